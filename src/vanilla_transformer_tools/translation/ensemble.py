"""Several models that decode as one, by the mean of their probabilities."""

import math

import torch
from torch import Tensor

from vanilla_transformer.search_vanilla_transformer import IncrementalDecoder


class MeanDecoding:
    """Decodes with several models as one, by the mean of their probabilities.

    There is a decoding of each model, all of the same sources. Shapes: B sentences · P prompt · N
    hypotheses of a sentence · V vocabulary.
    """

    def __init__(self, decodings: list[IncrementalDecoder]) -> None:
        self.decodings = decodings

    def first_logits(self, prompt: Tensor) -> Tensor:
        """Log-probabilities of the token after each prompt, `[B, P]` -> `[B, V]`."""
        return mean_log_probs([decoding.first_logits(prompt) for decoding in self.decodings])

    def next_logits(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Log-probabilities of the token after each hypothesis, `[B, N]` -> `[B, N, V]`."""
        logits = [decoding.next_logits(tokens, parents) for decoding in self.decodings]
        return mean_log_probs(logits)

    def keep(self, rows: Tensor) -> None:
        """Drops all sentences except those at `rows`."""
        for decoding in self.decodings:
            decoding.keep(rows)


def mean_log_probs(logits: list[Tensor]) -> Tensor:
    """Log of the mean of several models' probabilities, from the logits of each."""
    log_probs = torch.stack([part.log_softmax(-1, dtype=torch.float32) for part in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))
