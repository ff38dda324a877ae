"""Greedy and beam search, section 6.1, with the results of Transformers'.

The decoder runs step by step.
Finished sentences leave the batch, and the hypotheses of a sentence share one copy of their source.

Shapes: B sentences · S source · P prompt · H heads · E head size · D `d_model` · V vocabulary ·
N hypotheses of a sentence · K key positions · C candidates.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import generation
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers_vanilla_transformer import Attention, Layer
from .modules_vanilla_transformer import is_plain_linear, is_untouched

# Finished sentences are removed once they are an eighth of the batch: removal copies the rest.
LARGEST_FULL_SHARE = 7 / 8
# A GPU is asked this seldom what was chosen, because its queue of work runs empty meanwhile.
STEPS_BETWEEN_LOOKS = 8
# Makes a function that computes a plain linear layer.
Linear = Callable[[nn.Linear], Callable[[Tensor], Tensor]]


def plain_linear(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The product with the weight, as it is stored."""
    return partial(F.linear, weight=module.weight, bias=module.bias)


def direct_call(module: nn.Module, linear: Linear) -> Callable[..., Any]:
    """A function that computes `module`, without the overhead of `nn.Module` where possible.

    In a small model that overhead is a third of a step's time. A module with hooks or a `forward`
    of its own is called. A layer's own `forward` runs, so that it is described in one place; only
    its submodules are replaced.

    Args:
        module: Any part of a decoder.
        linear: Makes the functions of linear layers.
    """
    kind = type(module)
    if not is_untouched(module):
        return module
    if isinstance(module, nn.Linear) and is_plain_linear(module):
        return linear(module)
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        return partial(
            F.layer_norm,
            normalized_shape=module.normalized_shape,
            weight=module.weight,
            bias=module.bias,
            eps=module.eps,
        )
    if isinstance(module, nn.Dropout) and not module.training:
        return lambda x: x
    if kind.__module__ == Layer.__module__ and isinstance(module, (Layer, Attention)):
        return direct_copy(module, linear).forward
    return module.forward


def direct_copy(module: nn.Module, linear: Linear) -> Any:
    """A shallow copy of `module` whose submodules are plain functions; see `direct_call`."""
    direct = copy.copy(module)
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            vars(direct)[name] = [direct_call(part, linear) for part in child]
        else:
            vars(direct)[name] = direct_call(child, linear)
    if isinstance(module, Attention):
        name = module.config._attn_implementation
        if ALL_ATTENTION_FUNCTIONS.get(name) is sdpa_attention_forward:
            direct.kernel = _run_torch_kernel  # type: ignore[assignment]
    return direct


def _run_torch_kernel(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float,
    attn_implementation: str,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`, for masks that leave nothing to find out."""
    heads = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling
    )
    return heads.transpose(1, 2), None


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
        return self.decoder.run_layers(*states, attn_implementation=self.kernel)

    def _encoding(self, length: int) -> Tensor:
        """Encoding `[1, length, D]` of the next positions, computed for many positions together."""
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
    """Logits processors, those that ban single tokens merged into one.

    Args:
        processors: Each looks at single rows only.
    """

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
    """Number of steps after which tokens are read, which waits for every device but the CPU.

    No step goes beyond the `longest` number of tokens that an open sentence may still have.
    """
    return 1 if device.type == "cpu" else max(1, min(STEPS_BETWEEN_LOOKS, longest))


def _kept(is_open: list[bool]) -> list[int] | None:
    """Indices of the rows that stay, None if too few have finished."""
    if sum(is_open) > LARGEST_FULL_SHARE * len(is_open):
        return None
    return [index for index, stays in enumerate(is_open) if stays]


def num_candidates(num_beams: int, end_tokens: set[int]) -> int:
    """Candidates C of a step of beam search: enough for N to continue, even if others end."""
    return num_beams * max(2, 1 + len(end_tokens))


@dataclass
class Beam:
    """The hypotheses of one sentence; `beam_search` explains the settings.

    Attributes:
        limit: Longest output in tokens, prompt not counted.
        num_beams: Number of hypotheses that continue, and of finished ones that are kept.
        length_penalty: Exponent of the length in ranks.
        early_stopping: When to stop looking for better hypotheses.
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

    Args:
        decoding: A fresh `IncrementalDecoder` of the B sources, or what decodes like one.
        prompt: Beginning of each output, `[B, P]`.
        limits: Longest output of each sentence in tokens, prompt not counted.
        end_tokens: Tokens that end an output.
        constraints: Which tokens may follow.
        num_beams: Number of hypotheses N that continue at each step.
        length_penalty: Exponent a in the rank of a finished one, log-probability / length^a.
        early_stopping: True: a sentence ends with N finished ones. False: once the best open one,
            if it ended now, would not rank among them. "never": the same, if it ended at the
            largest of the limits, for a > 0.

    Returns:
        For each sentence N outputs after the prompt with their ranks, best first.
    """
    candidates = num_candidates(num_beams, end_tokens)
    settings = (num_beams, length_penalty, early_stopping, max(limits))
    beams = [Beam(limit, *settings) for limit in limits]
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
        best, tokens = log_probs.topk(min(candidates, log_probs.shape[-1]))
        count, each = best.shape[1:]
        best, tokens = (best + scores[..., None]).flatten(1), tokens.flatten(1)
        if (missing := candidates - count * each) > 0:
            # A vocabulary smaller than the beam: impossible hypotheses fill it up.
            best = F.pad(best, (0, missing), value=-torch.inf)
            tokens = F.pad(tokens, (0, missing))
        best, indices = best.topk(candidates)
        tokens, parents = tokens.gather(1, indices), (indices // each).clamp(max=count - 1)
        unseen.append((best, tokens, parents))
        # As in `Beam.advance`: the best that do not end.
        has_ended = (tokens[..., None] == ends).any(-1)
        going_on = has_ended.byte().argsort(dim=-1, stable=True)[:, :num_beams]
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
