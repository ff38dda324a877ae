"""Greedy and beam search, with the results of Transformers' own.

Sentences leave the batch as they finish, and their hypotheses are kept in plain Python.

Shapes: B sentences · P prompt · N hypotheses of a sentence · V vocabulary · C candidates.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

# Copying what stays pays once an eighth of the sentences has finished.
LARGEST_FULL_SHARE = 7 / 8


def padded(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal length, filled up on the right, and their mask (1 = real), `[B, longest]`."""
    ids = pad_sequence(
        [torch.tensor(row, dtype=torch.long) for row in rows],
        batch_first=True,
        padding_value=filler,
    )
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


class Decoding(Protocol):
    """What a search needs of a model, or of several; see `IncrementalDecoder`."""

    def first_logits(self, prompt: Tensor) -> Tensor:
        """`[B, P]` -> `[B, V]`."""

    def next_logits(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """`[B, N]` -> `[B, N, V]`."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all sentences but those at `rows`."""


class Constraints:
    """Logits processors, those that ban single tokens merged into one.

    Args:
        processors: Of which none looks beyond the row that it is given.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self.banned: set[int] = set()
        self.others: list[LogitsProcessor] = []
        for processor in processors:
            if isinstance(processor, SuppressTokensLogitsProcessor):
                self.banned.update(processor.suppress_tokens.tolist())
            elif isinstance(processor, NoBadWordsLogitsProcessor) and all(
                len(words) == 1 for words in processor.sequence_bias
            ):
                # Not `bad_word_ids`, which still hold an end token that may not be banned.
                self.banned.update(token for (token,) in processor.sequence_bias)
            else:
                self.others.append(processor)

    @classmethod
    def of(cls, config: GenerationConfig, device: torch.device | str = "cpu") -> "Constraints":
        """What a generation config forbids: its `suppress_tokens` and `bad_words_ids`.

        Args:
            config: Its other settings are not read.
            device: Of the scores.
        """
        processors: list[LogitsProcessor] = []
        if config.suppress_tokens:
            processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
        if config.bad_words_ids:
            processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, config.eos_token_id))
        return cls(processors)

    def __call__(self, scores: Tensor, sequences: Iterable[list[int]]) -> Tensor:
        """Scores `[rows, V]` of what may follow, in float32; changes them in place.

        Args:
            scores: Of all tokens.
            sequences: The rows so far, prompts included; consumed only if a processor reads them.
        """
        if self.banned:
            scores[:, list(self.banned)] = -torch.inf
        if self.others:
            ids = torch.tensor(list(sequences), device=scores.device)
            for processor in self.others:
                scores = processor(ids, scores)
        return scores


def greedy_search(
    decoding: Decoding,
    prompt: Tensor,
    limits: list[int],
    end_tokens: set[int],
    constraints: Constraints,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> list[list[int]]:
    """The likeliest next token again and again, or one that is drawn.

    Args:
        decoding: Fresh, of the B sources.
        prompt: What each output begins with, `[B, P]`.
        limits: Longest output of each sentence in tokens, prompt not counted.
        end_tokens: Tokens behind which an output ends.
        constraints: Which tokens may follow.
        draw: Chooses from scores `[B, V]` a token of each row `[B]`. Sentences stay in the batch
            then, so that what is drawn for one does not depend on the others.

    Returns:
        Outputs behind the prompt, with the end token of those that ended.
    """
    prompts = prompt.tolist()
    outputs: list[list[int]] = [[] for _ in prompts]
    lengths: dict[int, int] = {}
    rows = list(range(len(prompts)))
    logits = decoding.first_logits(prompt)
    while True:
        # A copy even of float32: constraints write into it.
        scores = constraints(
            logits.to(torch.float32, copy=True),
            (prompts[row] + outputs[row] for row in rows),
        )
        chosen = scores.argmax(-1) if draw is None else draw(scores)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            outputs[row].append(token)
            if token in end_tokens or len(outputs[row]) >= limits[row]:
                # The first end counts; a row may stay in the batch behind it.
                lengths.setdefault(row, len(outputs[row]))
        if len(lengths) == len(prompts):
            return [output[: lengths[row]] for row, output in enumerate(outputs)]
        kept = None if draw else _kept([row not in lengths for row in rows], prompt.device)
        if kept is not None:
            rows = [rows[index] for index in kept.tolist()]
            decoding.keep(kept)
            chosen = chosen[kept]
        logits = decoding.next_logits(chosen[:, None])[:, 0]


def _kept(is_open: list[bool], device: torch.device) -> Tensor | None:
    """Indices of the rows that stay, None as long as it does not pay to part them."""
    if sum(is_open) > LARGEST_FULL_SHARE * len(is_open):
        return None
    return torch.tensor([index for index, stays in enumerate(is_open) if stays], device=device)


@dataclass
class BeamSettings:
    """How a beam search ranks and ends; the names are those of Transformers' `GenerationConfig`.

    Attributes:
        num_beams: Hypotheses N that go on at each step.
        length_penalty: Exponent a in the rank of a finished one, log-probability / length^a.
        early_stopping: True: N finished ones are enough. False: unless the best that goes on, were
            it to end now, ranks higher. "never": were it to end at the limit, for a > 0.
        max_length: The limit that "never" reckons with, prompt not counted.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_length: int = 0

    def candidates(self, end_tokens: set[int]) -> int:
        """Candidates C at each step: enough that N go on, even if each of them may end."""
        return self.num_beams * max(2, 1 + len(end_tokens))


@dataclass
class Beam:
    """The hypotheses of one sentence.

    Attributes:
        settings: Of the search.
        limit: Longest output in tokens, prompt not counted.
        tokens: Outputs so far of those that go on, best first.
        scores: Log-probability of each.
        parents: Which of the hypotheses before the last step each goes on from.
        finished: Rank and output of the N best that ended, best first.
        done: None that goes on could still be among them.
    """

    settings: BeamSettings
    limit: int
    tokens: list[list[int]] = field(default_factory=lambda: [[]])
    scores: list[float] = field(default_factory=lambda: [0.0])
    parents: list[int] = field(default_factory=lambda: [0])
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False

    def advance(
        self, scores: list[float], tokens: list[int], parents: list[int], end_tokens: set[int]
    ) -> None:
        """Takes in one step.

        Args:
            scores: Log-probabilities of the C candidates, best first.
            tokens: Last token of each.
            parents: Which of the hypotheses each goes on from.
            end_tokens: Tokens that finish a candidate.
        """
        length = len(self.tokens[0]) + 1
        at_limit = length >= self.limit
        width = self.settings.num_beams
        going_on = []
        for index, token in enumerate(tokens):
            if not (at_limit or token in end_tokens):
                going_on.append(index)
            elif index < width and not self.done:
                # Lower candidates only stand by, in case that many of the first end.
                rank = scores[index] / length**self.settings.length_penalty
                self.finished.append((rank, [*self.tokens[parents[index]], token]))
        self.finished.sort(key=lambda hypothesis: -hypothesis[0])
        del self.finished[width:]
        self.done |= at_limit or not self._may_improve(scores[going_on[0]], length)
        # What has reached the limit is as good as anything while it stays in the batch.
        going_on = (going_on or list(range(width)))[:width]
        self.tokens = [[*self.tokens[parents[index]], tokens[index]] for index in going_on]
        self.scores = [scores[index] for index in going_on]
        self.parents = [parents[index] for index in going_on]

    def _may_improve(self, best_score: float, length: int) -> bool:
        settings = self.settings
        if len(self.finished) < settings.num_beams:
            return True
        if settings.early_stopping is True:
            return False
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = settings.max_length
        return best_score / length**settings.length_penalty > self.finished[-1][0]


def beam_search(
    decoding: Decoding,
    prompt: Tensor,
    limits: list[int],
    end_tokens: set[int],
    constraints: Constraints,
    settings: BeamSettings,
) -> list[list[tuple[float, list[int]]]]:
    """The likeliest outputs that a beam of hypotheses finds.

    Args:
        decoding: Fresh, of the B sources.
        prompt: What each output begins with, `[B, P]`.
        limits: Longest output of each sentence in tokens, prompt not counted.
        end_tokens: Tokens behind which an output ends.
        constraints: Which tokens may follow.
        settings: Width of the beam, ranks and end.

    Returns:
        For each sentence N outputs behind the prompt with their ranks, best first.
    """
    candidates = settings.candidates(end_tokens)
    prompts = prompt.tolist()
    beams = [Beam(settings, limit) for limit in limits]
    rows = list(range(len(beams)))
    logits = decoding.first_logits(prompt)[:, None]
    while True:
        log_probs = constraints(
            logits.log_softmax(-1, dtype=torch.float32).flatten(0, 1),
            (prompts[row] + ids for row in rows for ids in beams[row].tokens),
        ).view_as(logits)
        scores = torch.tensor([beams[row].scores for row in rows], device=prompt.device)
        # Of each hypothesis' candidates, then of all of a sentence.
        best, tokens = log_probs.topk(candidates)
        best, indices = (best + scores[..., None]).flatten(1).topk(candidates)
        tokens, parents = tokens.flatten(1).gather(1, indices), indices // candidates
        steps = zip(rows, best.tolist(), tokens.tolist(), parents.tolist(), strict=True)
        for row, best_of_row, tokens_of_row, parents_of_row in steps:
            beams[row].advance(best_of_row, tokens_of_row, parents_of_row, end_tokens)
        if all(beam.done for beam in beams):
            return [beam.finished for beam in beams]
        kept = _kept([not beams[row].done for row in rows], prompt.device)
        if kept is not None:
            rows = [rows[index] for index in kept.tolist()]
            decoding.keep(kept)
        newest = [[ids[-1] for ids in beams[row].tokens] for row in rows]
        origins = [beams[row].parents for row in rows]
        logits = decoding.next_logits(
            torch.tensor(newest, device=prompt.device), torch.tensor(origins, device=prompt.device)
        )
