"""Positions, attention, feed-forward networks and layers, in the order in which to build them.

The paper is "Attention Is All You Need" (arXiv 1706.03762): positions are its section 3.5,
attention is 3.2, feed-forward networks are 3.3, and layers are 3.1.

Shapes: B batch · S source · T target · Q, K query and key positions · D `d_model` · H heads ·
E head size (d_k or d_v) · F feed-forward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_vanilla_transformer import VanillaTransformerConfig

# Which of query, key and value a projection yields.
ALL, QUERY, KEY_VALUE = slice(None), slice(1), slice(1, None)


class SinusoidalPositions(nn.Module):
    """Sines and cosines with wavelengths from 2 pi to 2 pi times the base.

    Nothing is stored, so nothing can be lost in loading, and sequences may have any length.
    """

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        self.offset = config.position_offset
        self.is_interleaved = config.position_embedding_type == "sinusoidal"
        # Derived in float64, whatever the dtype of the weights.
        self.frequencies = [
            config.position_base ** (-column / config.d_model)
            for column in range(0, config.d_model, 2)
        ]

    def forward(
        self, position_ids: Tensor, dtype: torch.dtype, most: int | Tensor | None = None
    ) -> Tensor:
        """Encodes positions, with angles in float32, or in float64 for a float64 model.

        Args:
            position_ids: Counted from 0, `[B, Q]` or `[1, Q]`.
            dtype: Dtype of the result.
            most: For tables, which end.

        Returns:
            `[B, Q, D]` or `[1, Q, D]`: sines in the even columns and cosines in the odd ones, or,
            not interleaved, sines in the first half.
        """
        angle_dtype = torch.promote_types(dtype, torch.float32)
        frequencies = torch.tensor(self.frequencies, dtype=angle_dtype)
        # A blocking copy would wait for all that the device has to do.
        frequencies = frequencies.to(position_ids.device, non_blocking=True)
        angles = (position_ids + self.offset)[..., None].to(angle_dtype) * frequencies
        pair_axis = -1 if self.is_interleaved else -2
        return torch.stack((angles.sin(), angles.cos()), dim=pair_axis).flatten(-2).to(dtype)


class LearnedPositions(nn.Embedding):
    """A learned row for each position (section 3.5, table 3 row E)."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.max_position_embeddings + config.position_offset, config.d_model)
        self.offset = config.position_offset

    def forward(  # type: ignore[override]
        self, position_ids: Tensor, dtype: torch.dtype, most: int | Tensor | None = None
    ) -> Tensor:
        """Looks positions up, `[B, Q]` or `[1, Q]` -> the same with a last axis D.

        Args:
            position_ids: Counted from 0.
            dtype: Dtype of the result.
            most: Number that no sequence is longer than; if it is not known, or beyond the end of
                the table, the positions are read, which waits for a GPU.

        Raises:
            ValueError: If a position is beyond the end of the table.
        """
        # Compiled code checks indices itself; on the meta device there are none.
        if not (torch.compiler.is_compiling() or position_ids.is_meta):
            fits = isinstance(most, int) and most <= self.num_embeddings - self.offset
            if not fits:
                self._refuse_end(int(position_ids.max()) + 1)
        return super().forward(position_ids + self.offset).to(dtype)

    def _refuse_end(self, length: int) -> None:
        longest = self.num_embeddings - self.offset
        if length > longest:
            raise ValueError(
                f"Learned positions end after {longest} tokens (`max_position_embeddings`), "
                f"got a sequence of {length}. Cut it, or train a model with more positions, or "
                "with sinusoidal ones, which have no end."
            )


POSITIONS = {
    "sinusoidal": SinusoidalPositions,
    "sinusoidal_concatenated": SinusoidalPositions,
    "learned": LearnedPositions,
}


def eager_attention_forward(
    module: "Attention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, equation (1), with the softmax in float32 or wider.

    Talking heads mix the score maps before the mask, since a masked score times a negative weight
    would become the largest, and the weights after the softmax (arXiv 2003.02436, figure 1).

    Args:
        module: The attention module: its head mixing, and whether it is training.
        query: `[B, H, Q, E]`.
        key: `[B, H, K, E]`.
        value: `[B, H, K, E]`.
        attention_mask: Added to the scores, `[B, 1, Q, K]`.
        scaling: 1 / sqrt(d_k).
        dropout: Rate on the attention weights.
        kwargs: For other kernels of Transformers' registry; unused.

    Returns:
        The heads' outputs `[B, Q, H, E]` and the weights applied to the values, `[B, H, Q, K]`.
    """
    scores = module.logits_mixing(query @ key.transpose(-2, -1) * scaling)
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=softmax_dtype).to(query.dtype)
    weights = module.weights_mixing(weights)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def fused_linear(in_features: int, row_counts: tuple[int, ...], bias: bool) -> nn.Linear:
    """Several linear maps of the same input as one matrix product.

    Args:
        in_features: Width of the input.
        row_counts: Output width of each logical matrix; matrices are stacked. An attribute of the
            same name keeps them.
        bias: Whether each output has one.
    """
    module = nn.Linear(in_features, sum(row_counts), bias)
    vars(module)["row_counts"] = row_counts
    return module


class HeadMixing(nn.Module):
    """Learned linear combinations of the maps of all heads ("talking heads").

    Args:
        heads: Number of input maps.
        mixed_heads: Number of output maps.
    """

    def __init__(self, heads: int, mixed_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(mixed_heads, heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The identity, cut off or repeated where the matrix is not square."""
        mixed_heads, heads = self.weight.shape
        init.copy_(self.weight, torch.eye(heads)[torch.arange(mixed_heads) % heads])

    def forward(self, maps: Tensor) -> Tensor:
        """`[B, heads, Q, K]` -> `[B, mixed heads, Q, K]`."""
        mixed: Tensor = self.weight.to(maps.dtype) @ maps.flatten(2)
        return mixed.unflatten(-1, maps.shape[2:])


def run_kernel(
    module: "Attention", *tensors: Tensor | None, attn_implementation: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Runs the attention kernel of that name in Transformers' registry.

    Args:
        module: The attention module.
        tensors: Further arguments of `eager_attention_forward`, which is the kernel "eager".
        attn_implementation: Name of the kernel.
        kwargs: Further arguments by name.

    Returns:
        The heads' outputs `[B, Q, H, E]`, and the weights, None from a kernel that never forms
        them.
    """
    kernel: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        attn_implementation, eager_attention_forward
    )
    return kernel(module, *tensors, **kwargs)


class Attention(nn.Module):
    """Common to self- and cross-attention, section 3.2.2: all but the input projections."""

    # What computes softmax and weighted sum of all heads.
    kernel: Callable[..., tuple[Tensor, Tensor | None]] = staticmethod(run_kernel)

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        shapes = config.head_shapes(num_heads)
        # A plain tuple: torch.compile cannot slice a named one.
        self.head_shapes = tuple(shapes)
        self.row_counts = tuple(shape.heads * shape.size for shape in shapes)
        self.scaling = shapes.key.size**-0.5
        self.logits_mixing: nn.Module = nn.Identity()
        self.weights_mixing: nn.Module = nn.Identity()
        if config.talking_heads in ("logits", "both"):
            self.logits_mixing = HeadMixing(shapes.key.heads, num_heads)
        if config.talking_heads in ("weights", "both"):
            self.weights_mixing = HeadMixing(num_heads, shapes.value.heads)
        self.attention_dropout = config.attention_dropout
        self.layer_idx = layer_idx
        # Transformers' kernels read it if they get no mask.
        self.is_causal = is_causal
        self.out_proj = nn.Linear(self.row_counts[-1], config.d_model, config.attention_bias)

    def split_heads(self, projected: Tensor, wanted: slice = ALL) -> list[Tensor]:
        """Cuts a fused projection into queries, keys and values, in that order, and into heads.

        Only this method knows the order of rows: query, key, value; each head contiguous.

        Args:
            projected: Matrices side by side, `[B, Q, n * H * E]`.
            wanted: Which of the three they are.

        Returns:
            One `[B, H, Q, E]` for each of the n matrices.
        """
        batch, length, _ = projected.shape
        parts = projected.split(self.row_counts[wanted], dim=-1)
        shapes = self.head_shapes[wanted]
        return [
            part.view(batch, length, *shape).transpose(1, 2)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends with each head, and joins the heads.

        Returns:
            The sublayer's output `[B, Q, D]` and the weights applied to the values,
            `[B, H, Q, K]`, None from a kernel that never forms them.
        """
        heads, weights = self.kernel(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.out_proj(heads.flatten(-2)), weights


class SelfAttention(Attention):
    """Attention of a sequence to itself."""

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ) -> None:
        super().__init__(config, num_heads, layer_idx, is_causal)
        self.qkv_proj = fused_linear(config.d_model, self.row_counts, config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends within `hidden_states` `[B, Q, D]`, and to earlier positions in the cache.

        Returns:
            As `attend`.
        """
        query, key, value = self.split_heads(self.qkv_proj(hidden_states))
        if past_key_values is not None:
            cache = past_key_values.self_attention_cache
            key, value = cache.update(key, value, self.layer_idx)
        return self.attend(query, key, value, attention_mask, **kwargs)


class CrossAttention(Attention):
    """Attention of the target to the encoder's output ("encoder-decoder attention")."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int) -> None:
        super().__init__(config, num_heads, layer_idx)
        self.q_proj = nn.Linear(config.d_model, self.row_counts[0], config.attention_bias)
        self.kv_proj = fused_linear(config.d_model, self.row_counts[1:], config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `hidden_states` `[B, T, D]` to `encoder_hidden_states` `[B, S, D]`.

        Returns:
            As `attend`.
        """
        (query,) = self.split_heads(self.q_proj(hidden_states), QUERY)
        key, value = self.source_keys_and_values(encoder_hidden_states, past_key_values)
        return self.attend(query, key, value, attention_mask, **kwargs)

    def source_keys_and_values(
        self, encoder_hidden_states: Tensor, past_key_values: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Projects the source once per sentence: later steps read the result from the cache.

        Returns:
            Keys and values, each `[B, H, S, E]`.
        """
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            # Offloading fetches entries only on update; these are never updated again.
            device = encoder_hidden_states.device
            return layer.keys.to(device), layer.values.to(device)
        key, value = self.split_heads(self.kv_proj(encoder_hidden_states), KEY_VALUE)
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key, value


class Layer(GradientCheckpointingLayer):
    """Common to encoder and decoder layers: residual connections and the feed-forward network.

    Args:
        config: The model's configuration.
        ffn_dim: Inner width F of the feed-forward network.
    """

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.pre_norm = config.pre_norm
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def residual(
        self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Residual connection of section 3.1; only this method knows where the norm goes."""
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Position-wise feed-forward network, equation (2): `[B, Q, D]` -> `[B, Q, D]`."""
        return self.fc2(self.activation_dropout(self.activation(self.fc1(x))))


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
