"""Greedy and beam search, section 6.1, with the results of Transformers'.

The decoder runs step by step.
Finished sentences leave the batch, and the hypotheses of a sentence share one copy of their source.

Shapes: B sentences · S source · P prompt · H heads · E head size · D `d_model` · V vocabulary ·
N hypotheses of a sentence · K key positions · C candidates.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import generation
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .modules_vanilla_transformer import direct_call, direct_copy, plain_linear

# Finished sentences are removed once they are an eighth of the batch: removal copies the rest.
LARGEST_FULL_SHARE = 7 / 8
# A GPU is asked this seldom what was chosen, because its queue of work runs empty meanwhile.
STEPS_BETWEEN_LOOKS = 8


class IncrementalDecoder:
    """The decoder of one model, fed position by position.

    The hypotheses of a sentence take the axis of target positions, so all of them read one copy of
    their source's keys and values. Their own keys never change places: those of all hypotheses are
    side by side, and a mask shows each hypothesis its own past.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        encoder_hidden_states: `[B, S, D]`.
        attention_mask: 1 = real source token, `[B, S]`; None: all are.
    """

    def __init__(
        self,
        model: Any,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> None:
        linear = getattr(model.model.backend, "linear", plain_linear)
        self.decoder = direct_copy(model.model.decoder, linear)
        self.lm_head = direct_call(model.lm_head, linear)
        self.kernel = model.config._attn_implementation
        self.source = encoder_hidden_states
        self.source_mask = None
        if attention_mask is not None and not attention_mask.all():
            self.source_mask = _as_bias(attention_mask[:, None, None].bool(), self.source.dtype)
        self.cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self.position = 0
        self.positions = self.source.new_empty(1, 0, 0)
        self.past = self.source.new_empty(0, 0, 0)

    def first_logits(self, prompt: Tensor) -> Tensor:
        """Logits `[B, V]` of the token after the prompts `[B, P]`, which have no padding."""
        length = prompt.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=prompt.device).tril()
        mask = _as_bias(seen[None, None], self.source.dtype) if length > 1 else None
        # Which earlier keys each hypothesis sees, `[B, N, K]`: all share the prompt.
        self.past = self.source.new_zeros(len(prompt), 1, length)
        hidden_states = self._run(prompt, self._encoding(length), mask)
        return self.lm_head(hidden_states[:, -1])

    def next_logits(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits `[B, N, V]` of the token after each hypothesis.

        Args:
            tokens: The newest of each hypothesis, `[B, N]`.
            parents: Index of the previous step's hypothesis that each continues, `[B, N]`; None: N
                is 1 throughout.
        """
        if parents is not None:
            past = self.past.gather(1, parents[..., None].expand(-1, -1, self.past.shape[-1]))
            count = tokens.shape[1]
            itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
            newest = _as_bias(itself, self.source.dtype).expand(len(tokens), count, count)
            self.past = torch.cat((past, newest), dim=-1)
        mask = None if parents is None else self.past[:, None]
        return self.lm_head(self._run(tokens, self._encoding(1), mask))

    def keep(self, rows: Tensor) -> None:
        """Forgets all sentences but those at `rows`."""
        self.source = self.source.index_select(0, rows)
        self.past = self.past.index_select(0, rows)
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, rows)
        caches = (self.cache.self_attention_cache, self.cache.cross_attention_cache)
        for layer in chain.from_iterable(cache.layers for cache in caches):
            # Layers of the model may have been taken out, so that their caches are empty.
            if layer.keys is not None:
                layer.keys = layer.keys.index_select(0, rows)
                layer.values = layer.values.index_select(0, rows)

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.decoder.embed(self.decoder.embed_tokens(tokens), positions)
        states = (x, mask, self.source, self.source_mask, self.cache)
        return self.decoder.run_layers(
            *states, positions=positions, attn_implementation=self.kernel
        )

    def _encoding(self, length: int) -> Tensor:
        """Encoding `[1, length, ...]` of the next positions, computed for many together."""
        start, self.position = self.position, self.position + length
        if self.position > self.positions.shape[1]:
            ahead = min(2 * self.position + 64, self.decoder.config.last_position)
            # Beyond the end of a table, the table reports the error.
            end = max(self.position, ahead)
            position_ids = torch.arange(end, device=self.source.device)[None]
            self.positions = self.decoder.encode_positions(position_ids, self.source.dtype, end)
        return self.positions[:, start : self.position]


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for visible keys, the smallest number for others."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)


class Constraints:
    """Logits processors of single rows, those that ban single tokens merged into one."""

    def __init__(self, processors: Iterable[generation.LogitsProcessor] = ()) -> None:
        self.banned: set[int] = set()
        self.others: list[generation.LogitsProcessor] = []
        self._banned_ids: Tensor | None = None
        for processor in processors:
            if isinstance(processor, generation.SuppressTokensLogitsProcessor):
                self.banned.update(processor.suppress_tokens.tolist())
            elif isinstance(processor, generation.NoBadWordsLogitsProcessor) and all(
                len(words) == 1 for words in processor.sequence_bias
            ):
                # Not `bad_word_ids`, which may hold an end token that must not be banned.
                self.banned.update(token for (token,) in processor.sequence_bias)
            else:
                self.others.append(processor)

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
    decoding: Any,
    prompt: Tensor,
    limits: list[int],
    end_tokens: set[int],
    constraints: Constraints,
    draw: Callable[[Tensor], Tensor] | None = None,
) -> list[list[int]]:
    """Continues with the likeliest token at each step, or with a drawn one.

    Args:
        decoding: A fresh `IncrementalDecoder` of the B sources, or what decodes like one.
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
    sequences, unread = prompt, _Unread(prompt.device, max(limits))
    logits = decoding.first_logits(prompt)
    while True:
        # A copy even of float32: constraints write into it.
        scores = constraints(logits.to(torch.float32, copy=True), sequences)
        chosen = scores.argmax(-1) if draw is None else draw(scores)
        if constraints.others:
            sequences = torch.cat((sequences, chosen[:, None]), dim=-1)
        if unread.add(chosen):
            for row, (token,) in unread.read(rows):
                outputs[row].append(token)
                if token in end_tokens or len(outputs[row]) >= limits[row]:
                    # The first end counts; a row may stay in the batch after it.
                    lengths.setdefault(row, len(outputs[row]))
            if len(lengths) == len(outputs):
                return [output[: lengths[row]] for row, output in enumerate(outputs)]
            is_open = [row not in lengths for row in rows]
            unread.expect(
                max(limits[row] - len(outputs[row]) for row in rows if row not in lengths)
            )
            if draw is None:
                rows, (chosen, sequences) = _leave(decoding, rows, is_open, chosen, sequences)
        logits = decoding.next_logits(chosen[:, None])[:, 0]


def _sent(numbers: Iterable[int], device: torch.device) -> Tensor:
    """The numbers on the device, whose queue of work the host does not wait for."""
    return torch.tensor(list(numbers)).to(device, non_blocking=True)


class _Unread:
    """Steps that the host has not read yet: reading waits for every device but the CPU."""

    def __init__(self, device: torch.device, longest: int) -> None:
        self.device = device
        self.steps: list[tuple[Tensor, ...]] = []
        self.expect(longest)

    def expect(self, longest: int) -> None:
        """Sets the next reading, after at most the `longest` number of tokens that may follow."""
        self.due = 1 if self.device.type == "cpu" else max(1, min(STEPS_BETWEEN_LOOKS, longest))

    def add(self, *step: Tensor) -> bool:
        """Adds what a step chose, each `[B, ...]`, and says whether it is time to read."""
        self.steps.append(step)
        return len(self.steps) == self.due

    def read(self, rows: list[int]) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """What was chosen for each of the `rows`, step by step."""
        steps = [torch.stack(parts).tolist() for parts in zip(*self.steps, strict=True)]
        self.steps = []
        for step in zip(*steps, strict=True):
            yield from zip(rows, zip(*step, strict=True), strict=True)


def _leave(
    decoding: Any, rows: list[int], is_open: list[bool], *tensors: Tensor
) -> tuple[list[int], list[Tensor]]:
    """Takes finished sentences out of the batch, once they are many, and out of the tensors."""
    if sum(is_open) > LARGEST_FULL_SHARE * len(is_open):
        return rows, list(tensors)
    kept = [index for index, stays in enumerate(is_open) if stays]
    indices = _sent(kept, tensors[0].device)
    decoding.keep(indices)
    return [rows[index] for index in kept], [x.index_select(0, indices) for x in tensors]


def num_candidates(num_beams: int, end_tokens: set[int]) -> int:
    """Candidates C of a step of beam search: enough for N to continue, even if others end."""
    return num_beams * max(2, 1 + len(end_tokens))


@dataclass
class Beam:
    """The hypotheses of one sentence.

    Attributes:
        limit: Longest output in tokens, prompt not counted.
        num_beams: Number of hypotheses that continue, and of finished ones that are kept.
        length_penalty: Exponent a in the rank of a finished one, log-probability / length^a.
        early_stopping: True: the sentence ends with N finished ones. False: once the best open one,
            if it ended now, would not rank among them. "never": the same, if it ended at `longest`,
            for a > 0.
        longest: The largest limit in the batch.
        tokens: Outputs so far of the open hypotheses, best first.
        finished: Rank and output of the N best finished ones, best first.
        done: No open hypothesis can still be among them.
    """

    limit: int
    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    longest: int = 0
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
        width = self.num_beams
        going_on = []
        for index, token in enumerate(tokens):
            if not (at_limit or token in end_tokens):
                going_on.append(index)
            elif index < width and not self.done and (at_limit or scores[index] > -torch.inf):
                # Lower candidates are spare, for the case that many of the first end. Where a
                # step has fewer possible ones than it looks at, impossible ones are among them.
                rank = scores[index] / length**self.length_penalty
                self.finished.append((rank, [*self.tokens[parents[index]], token]))
        self.finished.sort(key=lambda hypothesis: -hypothesis[0])
        del self.finished[width:]
        self.done |= at_limit or not self._may_improve(scores[going_on[0]], length)
        # A beam that is done may stay in the batch: its tokens do not matter.
        going_on = (going_on or list(range(width)))[:width]
        self.tokens = [[*self.tokens[parents[index]], tokens[index]] for index in going_on]

    def _may_improve(self, best_score: float, length: int) -> bool:
        if len(self.finished) < self.num_beams:
            return True
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.longest
        return best_score / length**self.length_penalty > self.finished[-1][0]


class Candidates(NamedTuple):
    """Continuations of the hypotheses of each sentence, best first; each tensor is `[B, C]`.

    Attributes:
        scores: Log-probabilities.
        tokens: Last token of each.
        parents: Index of the hypothesis that each continues.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor

    @classmethod
    def best(cls, log_probs: Tensor, scores: Tensor, count: int) -> Self:
        """The best of each hypothesis, then of all hypotheses of a sentence.

        Args:
            log_probs: Those of the next token, `[B, N, V]`.
            scores: Those of the hypotheses, `[B, N]`.
            count: Number of candidates C.
        """
        best, tokens = log_probs.topk(min(count, log_probs.shape[-1]))
        width, each = best.shape[1:]
        best, tokens = (best + scores[..., None]).flatten(1), tokens.flatten(1)
        if (missing := count - width * each) > 0:
            # A vocabulary smaller than the beam: impossible hypotheses fill it up.
            best = F.pad(best, (0, missing), value=-torch.inf)
            tokens = F.pad(tokens, (0, missing))
        best, indices = best.topk(count)
        return cls(best, tokens.gather(1, indices), (indices // each).clamp(max=width - 1))

    def open_ones(self, end_tokens: Tensor, count: int) -> list[Tensor]:
        """As in `Beam.advance`, the best that do not end, `[B, N]` each."""
        has_ended = (self.tokens[..., None] == end_tokens).any(-1)
        indices = has_ended.byte().argsort(dim=-1, stable=True)[:, :count]
        return [x.gather(1, indices) for x in self]


def beam_search(
    decoding: Any,
    prompt: Tensor,
    limits: list[int],
    end_tokens: set[int],
    constraints: Constraints,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[list[tuple[float, list[int]]]]:
    """The likeliest outputs found with a beam of hypotheses.

    It takes the arguments of `greedy_search`, and settings of a `Beam`.

    Returns:
        For each sentence N outputs after the prompt with their ranks, best first.
    """
    settings = (num_beams, length_penalty, early_stopping, max(limits))
    beams = [Beam(limit, *settings) for limit in limits]
    rows, width = list(range(len(beams))), num_candidates(num_beams, end_tokens)
    ends = _sent(sorted(end_tokens), prompt.device)
    # Of each open hypothesis, best first: its log-probability `[B, N]`, and its tokens.
    scores = torch.zeros(len(beams), 1, device=prompt.device)
    sequences, unread = prompt[:, None], _Unread(prompt.device, max(limits))
    logits = decoding.first_logits(prompt)[:, None]
    while True:
        log_probs = logits.log_softmax(-1, dtype=torch.float32).flatten(0, 1)
        log_probs = constraints(log_probs, sequences.flatten(0, 1)).view_as(logits)
        candidates = Candidates.best(log_probs, scores, width)
        scores, newest, parents = candidates.open_ones(ends, num_beams)
        if constraints.others:
            past = sequences.gather(1, parents[..., None].expand(-1, -1, sequences.shape[-1]))
            sequences = torch.cat((past, newest[..., None]), dim=-1)
        if unread.add(*candidates):
            for row, (best, tokens, origins) in unread.read(rows):
                beams[row].advance(best, tokens, origins, end_tokens)
            open_beams = [beam for beam in beams if not beam.done]
            if not open_beams:
                return [beam.finished for beam in beams]
            unread.expect(max(beam.limit - len(beam.tokens[0]) for beam in open_beams))
            is_open = [not beams[row].done for row in rows]
            rows, (scores, newest, parents, sequences) = _leave(
                decoding, rows, is_open, scores, newest, parents, sequences
            )
        logits = decoding.next_logits(newest, parents)
