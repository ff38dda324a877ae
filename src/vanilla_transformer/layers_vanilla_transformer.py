"""Encoder and decoder layers, section 3.1 of "Attention Is All You Need" (arXiv 1706.03762).

Shapes: B batch · S source · T target · Q query positions · D `d_model` · F feed-forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_vanilla_transformer import CrossAttention, SelfAttention
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .cpu_vanilla_transformer import Dropout, linear
from .shortcuts_vanilla_transformer import is_transformed


class Layer(GradientCheckpointingLayer):
    """Common to encoder and decoder layers: residual connections and the feed-forward network.

    Args:
        config: Of the model.
        ffn_dim: Inner width F of the feed-forward network.
    """

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.pre_norm = config.pre_norm
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)

    def residual(
        self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Residual connection of section 3.1; only this method knows where the norm goes."""
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Position-wise feed-forward network, equation (2): `[B, Q, D]` -> `[B, Q, D]`.

        ReLU's gradient needs its output, as `fc2`'s does; other activations' need their input. Then
        only the input is kept, and the output, which is cheap, is computed again.
        """
        hidden = linear(self.fc1, x)
        kept = isinstance(self.activation, nn.ReLU) or torch.compiler.is_compiling()
        if kept or not self.training or is_transformed():
            return self._contract(hidden)
        return checkpoint(self._contract, hidden, use_reentrant=False)

    def _contract(self, hidden: Tensor) -> Tensor:
        """`[B, Q, F]` -> `[B, Q, D]`."""
        return linear(self.fc2, self.activation_dropout(self.activation(hidden)))


class EncoderLayer(Layer):
    """Encoder layer of section 3.1: self-attention, then a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """`[B, S, D]` -> `[B, S, D]`."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask, **kwargs)[0],
        )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)


class DecoderLayer(Layer):
    """Decoder layer of section 3.1: causal self-attention, cross-attention, feed-forward."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, config.decoder_ffn_dim)
        num_heads = config.decoder_attention_heads
        self.self_attn = SelfAttention(config, num_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.encoder_attn = CrossAttention(config, num_heads, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask, past_key_values, **kwargs)[0],
        )
        hidden_states = self.residual(
            hidden_states,
            self.encoder_attn_layer_norm,
            lambda x: self.encoder_attn(
                x, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
            )[0],
        )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)
