"""The decoder one position at a time, for searches that keep several hypotheses of a sentence.

Shapes: B sentences · S source · P prompt · H heads · E head size · D `d_model` · V vocabulary ·
N hypotheses of a sentence · K key positions.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from .attention_vanilla_transformer import Attention
from .cpu_vanilla_transformer import WeightLayouts
from .shortcuts_vanilla_transformer import holds_only_known_code

# Number of positions that memory is first allocated for; it doubles when it is full.
POSITIONS_AHEAD = 16


class History(Cache):
    """Keys and values of the targets so far, appended in place and never moved."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0
        # Keys and values of each layer; their sizes and numbers of heads may differ.
        self.buffers: dict[int, list[Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values `[B, H, N, E]`; returns all of the layer, `[B, H, K, E]`."""
        # Layers may have been taken out, so that numbers are missing.
        nothing = [key_states[:, :, :0], value_states[:, :, :0]]
        buffers = self.buffers.setdefault(layer_idx, nothing)
        new = key_states.shape[2]
        end = self.length + new
        if end > buffers[0].shape[2]:
            room = end if self.length == 0 else 2 * end + POSITIONS_AHEAD * new
            buffers[:] = [_widened(buffer, self.length, room) for buffer in buffers]
        keys, values = (buffer.narrow(2, 0, end) for buffer in buffers)
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        return keys, values

    def keep(self, rows: Tensor) -> None:
        """Forgets all sentences but those at `rows`."""
        self.buffers = {
            layer_idx: [buffer.index_select(0, rows) for buffer in buffers]
            for layer_idx, buffers in self.buffers.items()
        }


def _widened(buffer: Tensor, filled: int, room: int) -> Tensor:
    """A copy `[B, H, room, E]` of a buffer, filled in the first positions."""
    batch, heads, _, size = buffer.shape
    wider = buffer.new_empty(batch, heads, room, size)
    wider[:, :, :filled] = buffer[:, :, :filled]
    return wider


def plain_call(module: nn.Module, layouts: WeightLayouts) -> Callable[..., Any]:
    """What a call of `module` computes in evaluation, without the overhead of `nn.Module`.

    In a small model that overhead is a third of a step's time. The module's own `forward` runs, so
    that a layer is described in one place; only its submodules are replaced, by plain functions.

    Args:
        module: Holds only known code.
        layouts: Of the model.
    """
    if isinstance(module, nn.Linear):
        return layouts.linear(module)
    if isinstance(module, nn.LayerNorm):
        return partial(
            F.layer_norm,
            normalized_shape=module.normalized_shape,
            weight=module.weight,
            bias=module.bias,
            eps=module.eps,
        )
    if isinstance(module, nn.Dropout):
        return _unchanged
    return plain_copy(module, layouts).forward


def plain_copy(module: nn.Module, layouts: WeightLayouts) -> Any:
    """A shallow copy of `module` whose submodules are plain functions; see `plain_call`."""
    plain = copy.copy(module)
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            vars(plain)[name] = [plain_call(part, layouts) for part in child]
        else:
            vars(plain)[name] = plain_call(child, layouts)
    if isinstance(module, Attention) and not module.config.talking_heads:
        vars(plain)["run_kernel"] = partial(_run_torch_kernel, module.scaling)
    return plain


def _unchanged(x: Tensor) -> Tensor:
    return x


def _run_torch_kernel(
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_implementation: str,
) -> tuple[Tensor, None]:
    """As `Attention.run_kernel`, with torch's kernel whatever the model is set to."""
    heads = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return heads.transpose(1, 2), None


class IncrementalDecoder:
    """The decoder of one model, fed position by position.

    The hypotheses of a sentence take the axis of target positions, so all of them read one copy of
    their source's keys and values. Their own keys are never moved: those of all hypotheses are
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
        self.decoder, self.lm_head = model.model.decoder, model.lm_head
        if holds_only_known_code(self.decoder):
            self.decoder = plain_copy(self.decoder, model.weight_layouts)
        if holds_only_known_code(self.lm_head):
            self.lm_head = plain_call(self.lm_head, model.weight_layouts)
        self.kernel = model.config._attn_implementation
        self.source = encoder_hidden_states
        self.source_mask = None
        if attention_mask is not None and not attention_mask.all():
            self.source_mask = _as_bias(attention_mask[:, None, None].bool(), self.source.dtype)
        self.history = History()
        self.cache = EncoderDecoderCache(self.history, DynamicCache())
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
        self.history.keep(rows)
        for layer in self.cache.cross_attention_cache.layers:
            if layer.keys is None:
                # Of a layer that was taken out.
                continue
            layer.keys, layer.values = (x.index_select(0, rows) for x in (layer.keys, layer.values))

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = self.decoder.embed(self.decoder.embed_tokens(tokens), positions)
        states = (x, mask, self.source, self.source_mask, self.cache)
        x = self.decoder.run_layers(*states, attn_implementation=self.kernel)
        self.history.length += tokens.shape[1]
        return x

    def _encoding(self, length: int) -> Tensor:
        """Encoding `[1, length, D]` of the next positions, computed for many positions at once."""
        start, self.position = self.position, self.position + length
        if self.position > self.positions.shape[1]:
            ahead = min(2 * self.position + 64, self.decoder.config.last_position)
            # Beyond the end of a table, the table reports the error.
            end = max(self.position, ahead)
            position_ids = torch.arange(end, device=self.source.device)[None]
            self.positions = self.decoder.embed_positions(position_ids, self.source.dtype, end)
        return self.positions[:, start : self.position]


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for visible keys, the smallest number for others."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)
