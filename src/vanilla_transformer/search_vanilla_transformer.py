"""Greedy and beam search, with the same results as Transformers'.

Finished sentences leave the batch, and hypotheses are plain Python lists.

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

# Finished sentences are removed once they are an eighth of the batch: removal copies the rest.
LARGEST_FULL_SHARE = 7 / 8
# A GPU is asked this seldom what was chosen, because its queue of work runs empty meanwhile.
STEPS_BETWEEN_LOOKS = 8


def padded(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal length, padded on the right, and their mask (1 = real), `[B, longest]`."""
    ids = pad_sequence(
        [torch.tensor(row, dtype=torch.long) for row in rows],
        batch_first=True,
        padding_value=filler,
    )
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


class Decoding(Protocol):
    """What a search needs from one model or several; see `IncrementalDecoder`."""

    def first_logits(self, prompt: Tensor) -> Tensor:
        """`[B, P]` -> `[B, V]`."""

    def next_logits(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """`[B, N]` -> `[B, N, V]`."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all sentences but those at `rows`."""


class Constraints:
    """Logits processors, those that ban single tokens merged into one.

    Args:
        processors: Each looks at single rows only.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self.banned: set[int] = set()
        self.others: list[LogitsProcessor] = []
        self._banned_ids: Tensor | None = None
        for processor in processors:
            if isinstance(processor, SuppressTokensLogitsProcessor):
                self.banned.update(processor.suppress_tokens.tolist())
            elif isinstance(processor, NoBadWordsLogitsProcessor) and all(
                len(words) == 1 for words in processor.sequence_bias
            ):
                # Not `bad_word_ids`, which may hold an end token that must not be banned.
                self.banned.update(token for (token,) in processor.sequence_bias)
            else:
                self.others.append(processor)

    @classmethod
    def of(cls, config: GenerationConfig, device: torch.device | str = "cpu") -> "Constraints":
        """The `suppress_tokens` and `bad_words_ids` of a generation config.

        Args:
            config: Other settings are ignored.
            device: Of the scores.
        """
        processors: list[LogitsProcessor] = []
        if config.suppress_tokens:
            processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
        if config.bad_words_ids:
            processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, config.eos_token_id))
        return cls(processors)

    def __call__(self, scores: Tensor, sequences: Tensor) -> Tensor:
        """Scores `[rows, V]` of the next token, in float32, changed in place.

        Args:
            scores: Of all tokens.
            sequences: The rows so far, prompts included, `[rows, T]`; only `others` read them.
        """
        if self.banned:
            if self._banned_ids is None:
                self._banned_ids = _sent(sorted(self.banned), scores.device)
            scores.index_fill_(1, self._banned_ids, -torch.inf)
        for processor in self.others:
            scores = processor(sequences, scores)
        return scores


def greedy_search(
    decoding: Decoding,
    prompt: Tensor,
    limits: list[int],
    end_tokens: set[int],
    constraints: Constraints,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> list[list[int]]:
    """Continues with the likeliest token at each step, or with a drawn one.

    Args:
        decoding: Fresh, of the B sources.
        prompt: Beginning of each output, `[B, P]`.
        limits: Longest output of each sentence in tokens, prompt not counted.
        end_tokens: Tokens that end an output.
        constraints: Which tokens may follow.
        draw: Chooses a token of each row `[B]` from scores `[B, V]`. All sentences then stay in
            the batch, so that the draws for one do not depend on the others.

    Returns:
        Outputs after the prompt, with the end token of those that ended.
    """
    outputs: list[list[int]] = [[] for _ in limits]
    lengths: dict[int, int] = {}
    rows = list(range(len(limits)))
    sequences, unseen = prompt, []
    until_look = _until_look(prompt.device, max(limits))
    logits = decoding.first_logits(prompt)
    while True:
        # A copy even of float32: constraints write into it.
        scores = constraints(logits.to(torch.float32, copy=True), sequences)
        chosen = scores.argmax(-1) if draw is None else draw(scores)
        unseen.append(chosen)
        if constraints.others:
            sequences = torch.cat((sequences, chosen[:, None]), dim=-1)
        if len(unseen) == until_look:
            for row, tokens in zip(rows, torch.stack(unseen, 1).tolist(), strict=True):
                for token in tokens:
                    outputs[row].append(token)
                    if token in end_tokens or len(outputs[row]) >= limits[row]:
                        # The first end counts; a row may stay in the batch after it.
                        lengths.setdefault(row, len(outputs[row]))
            if len(lengths) == len(outputs):
                return [output[: lengths[row]] for row, output in enumerate(outputs)]
            unseen = []
            longest = max(limits[row] for row in rows if row not in lengths)
            until_look = _until_look(prompt.device, longest - len(outputs[rows[0]]))
            kept = None if draw else _kept([row not in lengths for row in rows])
            if kept is not None:
                rows = [rows[index] for index in kept]
                indices = _sent(kept, prompt.device)
                decoding.keep(indices)
                chosen, sequences = (x.index_select(0, indices) for x in (chosen, sequences))
        logits = decoding.next_logits(chosen[:, None])[:, 0]


def _sent(numbers: Iterable[int], device: torch.device) -> Tensor:
    """The numbers on the device, whose queue of work the host does not wait for."""
    return torch.tensor(list(numbers)).to(device, non_blocking=True)


def _until_look(device: torch.device, longest: int) -> int:
    """Number of steps after which the tokens are read.

    Args:
        device: Reading waits for every device but the CPU.
        longest: Number of tokens that an open sentence may still have; no step goes beyond it.
    """
    return 1 if device.type == "cpu" else max(1, min(STEPS_BETWEEN_LOOKS, longest))


def _kept(is_open: list[bool]) -> list[int] | None:
    """Indices of the rows that stay, None if too few have finished."""
    if sum(is_open) > LARGEST_FULL_SHARE * len(is_open):
        return None
    return [index for index, stays in enumerate(is_open) if stays]


@dataclass
class BeamSettings:
    """How a beam search ranks and ends; names as in Transformers' `GenerationConfig`.

    Attributes:
        num_beams: Number of hypotheses N that continue at each step.
        length_penalty: Exponent a in the rank of a finished one, log-probability / length^a.
        early_stopping: True: ends with N finished ones. False: ends once the best open hypothesis,
            if it ended now, would not rank among them. "never": the same, if it ended at the limit,
            for a > 0.
        max_length: The limit for "never", prompt not counted.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    max_length: int = 0

    def candidates(self, end_tokens: set[int]) -> int:
        """Number of candidates C at each step: enough for N to continue, even if others end."""
        return self.num_beams * max(2, 1 + len(end_tokens))


@dataclass
class Beam:
    """The hypotheses of one sentence.

    Attributes:
        settings: Of the search.
        limit: Longest output in tokens, prompt not counted.
        tokens: Outputs so far of the open hypotheses, best first.
        finished: Rank and output of the N best finished ones, best first.
        done: No open hypothesis can still be among them.
    """

    settings: BeamSettings
    limit: int
    tokens: list[list[int]] = field(default_factory=lambda: [[]])
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    done: bool = False

    def advance(
        self, scores: list[float], tokens: list[int], parents: list[int], end_tokens: set[int]
    ) -> None:
        """Adds one step.

        Args:
            scores: Log-probabilities of the C candidates, best first.
            tokens: Last token of each.
            parents: Index of the hypothesis that each continues.
            end_tokens: Tokens that finish a candidate.
        """
        length = len(self.tokens[0]) + 1
        at_limit = length >= self.limit
        width = self.settings.num_beams
        going_on = []
        for index, token in enumerate(tokens):
            if not (at_limit or token in end_tokens):
                going_on.append(index)
            elif index < width and not self.done and (at_limit or scores[index] > -torch.inf):
                # Lower candidates are spare, for the case that many of the first end. Where a
                # step has fewer possible ones than it looks at, impossible ones are among them.
                rank = scores[index] / length**self.settings.length_penalty
                self.finished.append((rank, [*self.tokens[parents[index]], token]))
        self.finished.sort(key=lambda hypothesis: -hypothesis[0])
        del self.finished[width:]
        self.done |= at_limit or not self._may_improve(scores[going_on[0]], length)
        # A beam that is done may stay in the batch: its tokens do not matter.
        going_on = (going_on or list(range(width)))[:width]
        self.tokens = [[*self.tokens[parents[index]], tokens[index]] for index in going_on]

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
    """The likeliest outputs found with a beam of hypotheses.

    Args:
        decoding: Fresh, of the B sources.
        prompt: Beginning of each output, `[B, P]`.
        limits: Longest output of each sentence in tokens, prompt not counted.
        end_tokens: Tokens that end an output.
        constraints: Which tokens may follow.
        settings: Width of the beam, ranks and end.

    Returns:
        For each sentence N outputs after the prompt with their ranks, best first.
    """
    candidates = settings.candidates(end_tokens)
    beams = [Beam(settings, limit) for limit in limits]
    rows = list(range(len(beams)))
    ends = _sent(sorted(end_tokens), prompt.device)
    # Of each open hypothesis, best first: its log-probability `[B, N]`, and its tokens.
    scores = torch.zeros(len(beams), 1, device=prompt.device)
    sequences, unseen = prompt[:, None], []
    until_look = _until_look(prompt.device, max(limits))
    logits = decoding.first_logits(prompt)[:, None]
    while True:
        log_probs = constraints(
            logits.log_softmax(-1, dtype=torch.float32).flatten(0, 1), sequences.flatten(0, 1)
        ).view_as(logits)
        # The best of each hypothesis, then of all hypotheses of a sentence.
        best, tokens = log_probs.topk(candidates)
        best, indices = (best + scores[..., None]).flatten(1).topk(candidates)
        tokens, parents = tokens.flatten(1).gather(1, indices), indices // candidates
        unseen.append((best, tokens, parents))
        # As in `Beam.advance`: the best that do not end.
        has_ended = (tokens[..., None] == ends).any(-1)
        going_on = has_ended.byte().argsort(dim=-1, stable=True)[:, : settings.num_beams]
        scores, newest, origins = (x.gather(1, going_on) for x in (best, tokens, parents))
        if constraints.others:
            past = sequences.gather(1, origins[..., None].expand(-1, -1, sequences.shape[-1]))
            sequences = torch.cat((past, newest[..., None]), dim=-1)
        if len(unseen) == until_look:
            read = (torch.stack(parts).tolist() for parts in zip(*unseen, strict=True))
            for step in zip(*read, strict=True):
                for row, *found in zip(rows, *step, strict=True):
                    beams[row].advance(*found, end_tokens)
            if all(beam.done for beam in beams):
                return [beam.finished for beam in beams]
            unseen = []
            longest = max(beam.limit for beam in beams if not beam.done)
            until_look = _until_look(prompt.device, longest - len(beams[rows[0]].tokens[0]))
            kept = _kept([not beams[row].done for row in rows])
            if kept is not None:
                rows = [rows[index] for index in kept]
                indices = _sent(kept, prompt.device)
                decoding.keep(indices)
                scores, newest, origins, sequences = (
                    x.index_select(0, indices) for x in (scores, newest, origins, sequences)
                )
        logits = decoding.next_logits(newest, origins)
