"""The decoder one position at a time, for searches that keep several hypotheses of a sentence.

Shapes: B sentences · S source · P prompt · H heads · E head size · D `d_model` · V vocabulary ·
N hypotheses of a sentence · K key positions.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

# Positions for which memory is taken ahead, at first; it doubles as it fills.
POSITIONS_AHEAD = 16


class History(Cache):
    """Keys and values of the targets so far, appended in place and never moved."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0
        self.buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values `[B, H, N, E]`; returns all of the layer, `[B, H, K, E]`."""
        batch, heads, new, size = key_states.shape
        end = self.length + new
        if layer_idx == len(self.buffers):
            self.buffers.append(key_states.new_empty(2, batch, heads, end, size))
        buffer = self.buffers[layer_idx]
        if end > buffer.shape[3]:
            wider = buffer.new_empty(2, batch, heads, 2 * end + POSITIONS_AHEAD * new, size)
            wider[:, :, :, : self.length] = buffer[:, :, :, : self.length]
            buffer = self.buffers[layer_idx] = wider
        keys, values = buffer[0, :, :, :end], buffer[1, :, :, :end]
        keys[:, :, self.length :] = key_states
        values[:, :, self.length :] = value_states
        return keys, values

    def keep(self, rows: Tensor) -> None:
        """Forgets all sentences but those at `rows`."""
        self.buffers = [buffer.index_select(1, rows) for buffer in self.buffers]


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
        model: PreTrainedModel,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> None:
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head
        self.kernel = model.config._attn_implementation
        self.source = encoder_hidden_states
        self.source_mask = None
        if attention_mask is not None and not attention_mask.all():
            self.source_mask = _as_bias(attention_mask[:, None, None].bool(), self.source.dtype)
        self.history = History()
        self.cache = EncoderDecoderCache(self.history, DynamicCache())
        self.position = 0
        self.positions = self.source.new_empty(1, 0, 0)

    def first_logits(self, prompt: Tensor) -> Tensor:
        """Logits `[B, V]` of what follows the prompts `[B, P]`, of which no token is padding."""
        length = prompt.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=prompt.device).tril()
        mask = _as_bias(seen[None, None], self.source.dtype) if length > 1 else None
        hidden_states = self._run(prompt, self._encoding(length), mask)
        return self.lm_head(hidden_states[:, -1])

    def next_logits(self, tokens: Tensor, past: Tensor | None = None) -> Tensor:
        """Logits `[B, N, V]` of what follows each hypothesis.

        Args:
            tokens: The newest of each hypothesis, `[B, N]`.
            past: Which of the N had been the hypothesis' own at each position behind the prompt,
                the newest included, `[B, N, positions]`; None: N is 1.
        """
        mask = None
        if past is not None:
            own = past[..., None] == torch.arange(tokens.shape[1], device=past.device)
            prompt_length = self.history.length + tokens.shape[1] - own[0, 0].numel()
            # All hypotheses of a sentence have the prompt in common.
            own = torch.nn.functional.pad(own.flatten(2), (prompt_length, 0), value=True)
            mask = _as_bias(own[:, None], self.source.dtype)
        return self.lm_head(self._run(tokens, self._encoding(1), mask))

    def keep(self, rows: Tensor) -> None:
        """Forgets all sentences but those at `rows`."""
        self.source = self.source.index_select(0, rows)
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, rows)
        self.history.keep(rows)
        for layer in self.cache.cross_attention_cache.layers:
            layer.keys, layer.values = (x.index_select(0, rows) for x in (layer.keys, layer.values))

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        hidden_states = self.decoder.run_layers(
            self.decoder.embed(self.decoder.embed_tokens(tokens), positions),
            mask,
            self.source,
            self.source_mask,
            self.cache,
            self.kernel,
        )
        self.history.length += tokens.shape[1]
        return hidden_states

    def _encoding(self, length: int) -> Tensor:
        """Encoding `[1, length, D]` of the next positions, made for many positions at a time."""
        start, self.position = self.position, self.position + length
        if self.position > self.positions.shape[1]:
            position_ids = torch.arange(2 * self.position + 64, device=self.source.device)[None]
            self.positions = self.decoder.encode_positions(position_ids, self.source.dtype)
        return self.positions[:, start : self.position]


def _as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is visible, the least number elsewhere."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)
