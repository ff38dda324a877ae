"""The plugin's search as one function. Drop for `fast_search_vanilla_transformer`, which has it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vanilla_transformer.decoding_vanilla_transformer import IncrementalDecoder
from vanilla_transformer.search_vanilla_transformer import (
    BeamSettings,
    Constraints,
    beam_search,
    greedy_search,
)


def search(
    models: Sequence[Any],
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt: Tensor,
    limits: list[int],
    end_tokens: set[int],
    constraints: Constraints,
    settings: BeamSettings | None = None,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> list[list[tuple[float, list[int]]]]:
    """Hypotheses of each sentence, best first: their ranks, and their tokens after the prompt.

    Args:
        models: One model, or an ensemble, which searches by the mean of the probabilities.
        input_ids: Sources, `[B, S]`.
        attention_mask: 1 = real source token, `[B, S]`.
        prompt: Beginning of each output with the start token, `[B, P]`.
        limits: Longest output of each sentence in tokens, prompt not counted.
        end_tokens: Tokens that end an output.
        constraints: Which tokens may follow.
        settings: Settings of beam search; None: greedy search, or drawing.
        draw: Chooses a token of each row `[B]` from scores `[B, V]`; None: the likeliest.

    Raises:
        ValueError: If a beam needs more tokens than are allowed.
    """
    source = {"input_ids": input_ids, "attention_mask": attention_mask}
    decoders = [
        IncrementalDecoder(model, model.get_encoder()(**source)[0], attention_mask)
        for model in models
    ]
    decoding = decoders[0] if len(decoders) == 1 else _MeanDecoding(decoders)
    arguments = (decoding, prompt, limits, end_tokens, constraints)
    if settings is None:
        return [[(math.nan, tokens)] for tokens in greedy_search(*arguments, draw)]
    allowed = models[0].config.target_vocab_size - len(constraints.banned)
    if allowed < (needed := settings.candidates(end_tokens)):
        raise ValueError(
            f"A search with {settings.num_beams} beams needs {needed} target tokens that are not "
            f"banned, got {allowed}. Use fewer beams."
        )
    return beam_search(*arguments, settings)


def reason_against(model: PreTrainedModel) -> str | None:
    """Why `generate` has to search with one of our models; None: `search` can."""
    return next(model._reasons_to_call_forward(), None)


class _MeanDecoding:
    """Decodes with several models as one, by the mean of their probabilities."""

    def __init__(self, decodings: list[IncrementalDecoder]) -> None:
        self.decodings = decodings

    def first_logits(self, prompt: Tensor) -> Tensor:
        """Log-probabilities of the token after each prompt, `[B, P]` -> `[B, V]`."""
        return mean_log_probs([one.first_logits(prompt) for one in self.decodings])

    def next_logits(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Log-probabilities of the token after each hypothesis, `[B, N]` -> `[B, N, V]`."""
        return mean_log_probs([one.next_logits(tokens, parents) for one in self.decodings])

    def keep(self, rows: Tensor) -> None:
        """Drops all sentences except those at `rows`."""
        for decoding in self.decodings:
            decoding.keep(rows)


def mean_log_probs(logits: list[Tensor]) -> Tensor:
    """Log of the mean of the models' probabilities."""
    log_probs = torch.stack([one.log_softmax(-1, dtype=torch.float32) for one in logits])
    return log_probs.logsumexp(0) - math.log(len(logits))
