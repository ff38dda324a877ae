"""The decoder one position at a time, for searches that keep several hypotheses of a sentence.

Shapes: B sentences · S source · P prompt · H heads · E head size · D `d_model` · V vocabulary ·
N hypotheses of a sentence · K key positions.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from .attention_vanilla_transformer import QUERY
from .kernels_vanilla_transformer import is_untouched, linear_for_few_rows

# Positions for which memory is taken ahead, at first; it doubles as it fills.
POSITIONS_AHEAD = 16


class History(Cache):
    """Keys and values of the targets so far, appended in place and never moved."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0
        # Keys and values of each layer; their sizes and numbers of heads may differ.
        self.buffers: list[list[Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values `[B, H, N, E]`; returns all of the layer, `[B, H, K, E]`."""
        if layer_idx == len(self.buffers):
            self.buffers.append([key_states[:, :, :0], value_states[:, :, :0]])
        buffers = self.buffers[layer_idx]
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
        self.buffers = [
            [buffer.index_select(0, rows) for buffer in buffers] for buffers in self.buffers
        ]


def _widened(buffer: Tensor, filled: int, room: int) -> Tensor:
    """A copy `[B, H, room, E]` of what stands in the first places of a buffer."""
    batch, heads, _, size = buffer.shape
    wider = buffer.new_empty(batch, heads, room, size)
    wider[:, :, :filled] = buffer[:, :, :filled]
    return wider


class LayerStep:
    """A decoder layer for the newest positions, as plain tensor operations.

    What its modules compute, at half the price for a small model: there, a third of a step's time
    goes into calling modules.

    Args:
        layer: A `DecoderLayer`.
    """

    def __init__(self, layer: Any) -> None:
        self.residual = layer.residual
        self.self_attn, self.encoder_attn = layer.self_attn, layer.encoder_attn
        self.activation = layer.activation
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        self.norms = [
            partial(
                F.layer_norm,
                normalized_shape=norm.normalized_shape,
                weight=norm.weight,
                bias=norm.bias,
                eps=norm.eps,
            )
            for norm in norms
        ]
        linears = (
            self.self_attn.qkv_proj,
            self.self_attn.out_proj,
            self.encoder_attn.q_proj,
            self.encoder_attn.out_proj,
            layer.fc1,
            layer.fc2,
        )
        self.linears = [linear_for_few_rows(linear) for linear in linears]

    def __call__(
        self,
        x: Tensor,
        mask: Tensor | None,
        source_mask: Tensor | None,
        cache: EncoderDecoderCache,
    ) -> Tensor:
        """`[B, N, D]` -> `[B, N, D]`."""
        qkv_proj, self_out, q_proj, encoder_out, fc1, fc2 = self.linears
        self_norm, encoder_norm, final_norm = self.norms

        def attend_to_targets(x: Tensor) -> Tensor:
            attention = self.self_attn
            query, key, value = attention.split_heads(qkv_proj(x))
            key, value = cache.self_attention_cache.update(key, value, attention.layer_idx)
            heads = F.scaled_dot_product_attention(query, key, value, mask, scale=attention.scaling)
            return self_out(heads.transpose(1, 2).flatten(-2))

        def attend_to_source(x: Tensor) -> Tensor:
            attention = self.encoder_attn
            (query,) = attention.split_heads(q_proj(x), QUERY)
            source = cache.cross_attention_cache.layers[attention.layer_idx]
            heads = F.scaled_dot_product_attention(
                query, source.keys, source.values, source_mask, scale=attention.scaling
            )
            return encoder_out(heads.transpose(1, 2).flatten(-2))

        x = self.residual(x, self_norm, attend_to_targets)
        x = self.residual(x, encoder_norm, attend_to_source)
        return self.residual(x, final_norm, lambda x: fc2(self.activation(fc1(x))))


class IncrementalDecoder:
    """The decoder of one model, fed position by position.

    The hypotheses of a sentence stand where a target's positions stand otherwise, so that all of
    them read the one copy of their source's keys and values. Nor are their own keys ever moved:
    those of all hypotheses lie side by side, and a mask shows each hypothesis its own past.

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
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head
        if _holds_only_known_code(model.lm_head):
            self.lm_head = linear_for_few_rows(model.lm_head)
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
        # Talking heads are left to their modules.
        is_plain = not model.config.talking_heads and _holds_only_known_code(self.decoder)
        self.steps = [LayerStep(layer) for layer in self.decoder.layers] if is_plain else []

    def first_logits(self, prompt: Tensor) -> Tensor:
        """Logits `[B, V]` of what follows the prompts `[B, P]`, of which no token is padding."""
        length = prompt.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=prompt.device).tril()
        mask = _as_bias(seen[None, None], self.source.dtype) if length > 1 else None
        # What of the past each hypothesis sees, `[B, N, K]`: the prompt is common to all.
        self.past = self.source.new_zeros(len(prompt), 1, length)
        if self.steps:
            for layer in self.decoder.layers:
                layer.encoder_attn.source_keys_and_values(self.source, self.cache)
        hidden_states = self._run(prompt, self._encoding(length), mask)
        return self.lm_head(hidden_states[:, -1])

    def next_logits(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Logits `[B, N, V]` of what follows each hypothesis.

        Args:
            tokens: The newest of each hypothesis, `[B, N]`.
            parents: Which of the hypotheses of the step before each goes on from, `[B, N]`; None: N
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
            layer.keys, layer.values = (x.index_select(0, rows) for x in (layer.keys, layer.values))

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        decoder, cache = self.decoder, self.cache
        x = decoder.embed(decoder.embed_tokens(tokens), positions)
        if self.steps:
            for step in self.steps:
                x = step(x, mask, self.source_mask, cache)
            x = decoder.layer_norm(x)
        else:
            states = (x, mask, self.source, self.source_mask, cache)
            x = decoder.run_layers(*states, attn_implementation=self.kernel)
        self.history.length += tokens.shape[1]
        return x

    def _encoding(self, length: int) -> Tensor:
        """Encoding `[1, length, D]` of the next positions, made for many positions at a time."""
        start, self.position = self.position, self.position + length
        if self.position > self.positions.shape[1]:
            ahead = min(2 * self.position + 64, self.decoder.config.last_position)
            # Past the end of a table, it is the table that tells.
            end = max(self.position, ahead)
            position_ids = torch.arange(end, device=self.source.device)[None]
            self.positions = self.decoder.embed_positions(position_ids, self.source.dtype)
        return self.positions[:, start : self.position]


def _holds_only_known_code(part: nn.Module) -> bool:
    """Whether all modules are torch's and this package's own, and none is hooked or patched."""
    known = ("torch.nn.", "transformers.activations.", f"{__name__.rpartition('.')[0]}.")
    return all(
        f"{type(module).forward.__module__}.".startswith(known) and is_untouched(module)
        for module in part.modules()
    )


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is visible, the least number elsewhere."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)
