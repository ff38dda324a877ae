"""Attention, feed-forward networks and layers, in the order in which to build them.

The paper is "Attention Is All You Need" (arXiv 1706.03762): attention is its section 3.2,
feed-forward networks are 3.3, and layers are 3.1.

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

from .configuration_vanilla_transformer import HeadShape, VanillaTransformerConfig

NORMS: dict[str, type[nn.Module]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


def build_norm(config: VanillaTransformerConfig) -> nn.Module:
    """A norm of the residual stream, `[B, Q, D]` -> `[B, Q, D]`: the only place that builds one."""
    return NORMS[config.norm_type](config.d_model, config.layer_norm_eps)


def is_flash(attn_implementation: str) -> bool:
    """Whether a kernel is a flash kernel, whose mask is 2-D, `[B, K]`, or None."""
    return "flash" in attn_implementation


def drop_padding(
    key: Tensor, value: Tensor, attention_mask: Tensor, query_length: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Joins the keys and values of real source tokens end to end, as flash kernels need them.

    Transformers' own code would apply the source's mask to the target too, and drop or misplace
    queries.

    Args:
        key: `[B, H, S, E]`.
        value: `[B, H, S, E]`.
        attention_mask: 1 = real source token, `[B, S]`.
        query_length: Number of target positions T in each sentence; all are kept.

    Returns:
        Keys and values, each `[1, H, K, E]` with all K real tokens of the batch, and the start of
        each sentence, named as in `FlashAttentionKwargs`.
    """
    is_real = attention_mask.bool()
    key, value = (x.transpose(1, 2)[is_real].transpose(0, 1)[None] for x in (key, value))
    source_lengths = is_real.sum(-1)
    ends = torch.arange(len(is_real) + 1, device=key.device)
    lengths = {
        "cu_seq_lens_q": (ends * query_length).int(),
        "cu_seq_lens_k": F.pad(source_lengths.cumsum(0), (1, 0)).int(),
        "max_length_q": query_length,
        "max_length_k": int(source_lengths.max()),
    }
    return key, value, lengths


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


class HeadMixing(nn.Module):
    """Learned linear combinations of the maps of all heads ("talking heads")."""

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

    Arguments and results are those of `eager_attention_forward`, which is the kernel "eager"; the
    weights are None from a kernel that never forms them.
    """
    kernel: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        attn_implementation, eager_attention_forward
    )
    return kernel(module, *tensors, **kwargs)


def split_heads(projected: Tensor, shape: HeadShape) -> Tensor:
    """Gives each head its own axis: `[B, Q, H * E]` -> `[B, H, Q, E]`."""
    return projected.unflatten(-1, shape).transpose(1, 2)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turns each pair of columns by the angle of its position (arXiv 2104.09864, equation 34).

    The product of a query and a key then depends on the distance of their positions.

    Args:
        x: Queries or keys, `[B, H, Q, E]`, as is the result.
        positions: Cosine and sine for each pair, `[1 or B, Q, E / 2, 2]`.
    """
    cosine, sine = positions[:, None].unbind(-1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Common to self- and cross-attention, section 3.2.2: all but the input projections."""

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        # Computes softmax and weighted sum of all heads; a model's backend may replace it.
        self.kernel: Callable[..., tuple[Tensor, Tensor | None]] = run_kernel
        # Of queries, keys and values, as are the output widths of their projections.
        self.head_shapes = config.head_shapes(num_heads)
        self.widths = tuple(shape.heads * shape.size for shape in self.head_shapes)
        _, key, value = self.head_shapes
        self.scaling = key.size**-0.5
        self.logits_mixing: nn.Module = nn.Identity()
        self.weights_mixing: nn.Module = nn.Identity()
        if config.talking_heads in ("logits", "both"):
            self.logits_mixing = HeadMixing(key.heads, num_heads)
        if config.talking_heads in ("weights", "both"):
            self.weights_mixing = HeadMixing(num_heads, value.heads)
        self.attention_dropout = config.attention_dropout
        self.layer_idx = layer_idx
        # Transformers' kernels read it if they get no mask.
        self.is_causal = is_causal
        self.out_proj = nn.Linear(self.widths[-1], config.d_model, config.attention_bias)

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
        # Matrices of query, key and value as one: one product with the input computes all three.
        self.qkv_proj = nn.Linear(config.d_model, sum(self.widths), config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: EncoderDecoderCache | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends within `hidden_states` `[B, Q, D]`, and to earlier positions in the cache.

        The cache is extended in place. Positions are rotary ones, as `rotate` takes them; None:
        they were added to the embeddings.

        Returns:
            As `attend`.
        """
        # Rows of the fused matrix: query, key, value.
        parts = self.qkv_proj(hidden_states).split(self.widths, dim=-1)
        query, key, value = map(split_heads, parts, self.head_shapes)
        if positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            key, value = cache.self_attention_cache.update(key, value, self.layer_idx)
        return self.attend(query, key, value, attention_mask, **kwargs)


class CrossAttention(Attention):
    """Attention of the target to the encoder's output ("encoder-decoder attention")."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int) -> None:
        super().__init__(config, num_heads, layer_idx)
        self.q_proj = nn.Linear(config.d_model, self.widths[0], config.attention_bias)
        self.kv_proj = nn.Linear(config.d_model, sum(self.widths[1:]), config.attention_bias)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `hidden_states` `[B, T, D]` to `encoder_hidden_states` `[B, S, D]`.

        Returns:
            As `attend`.
        """
        query = split_heads(self.q_proj(hidden_states), self.head_shapes[0])
        key, value = self.source_keys_and_values(encoder_hidden_states, cache)
        if attention_mask is not None and is_flash(kwargs["attn_implementation"]):
            key, value, lengths = drop_padding(key, value, attention_mask, query.shape[2])
            return self.attend(query, key, value, None, **lengths, **kwargs)
        return self.attend(query, key, value, attention_mask, **kwargs)

    def source_keys_and_values(
        self, encoder_hidden_states: Tensor, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Projects the source once per sentence: later steps read the result from the cache.

        Returns:
            Keys and values, each `[B, H, S, E]`.
        """
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            # Offloading fetches entries only on update; these are never updated again.
            device, length = encoder_hidden_states.device, encoder_hidden_states.shape[1]
            # A static cache may be longer than the source.
            return layer.keys[:, :, :length].to(device), layer.values[:, :, :length].to(device)
        # Rows of the fused matrix: key, value.
        parts = self.kv_proj(encoder_hidden_states).split(self.widths[1:], dim=-1)
        key, value = map(split_heads, parts, self.head_shapes[1:])
        if cache is not None:
            cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value


class Layer(GradientCheckpointingLayer):
    """Common to encoder and decoder layers: residual connections and the feed-forward network.

    Layers are counted from 0 in each stack; `ffn_dim` is F.
    """

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int, ffn_dim: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.final_layer_norm = build_norm(config)
        self.pre_norm = config.pre_norm
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def residual(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Residual connection of section 3.1; only this method knows where the norm goes."""
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Position-wise feed-forward network, equation (2): `[B, Q, D]` -> `[B, Q, D]`."""
        return self.fc2(self.activation_dropout(self.activation(self.fc1(x))))


class EncoderLayer(Layer):
    """Encoder layer of section 3.1: self-attention, then a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.encoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = build_norm(config)

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
        super().__init__(config, layer_idx, config.decoder_ffn_dim)
        num_heads = config.decoder_attention_heads
        self.self_attn = SelfAttention(config, num_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = build_norm(config)
        self.encoder_attn = CrossAttention(config, num_heads, layer_idx)
        self.encoder_attn_layer_norm = build_norm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        cache: EncoderDecoderCache | None = None,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`; `positions` are those of `SelfAttention`."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask, cache, positions, **kwargs)[0],
        )
        hidden_states = self.residual(
            hidden_states,
            self.encoder_attn_layer_norm,
            lambda x: self.encoder_attn(
                x, encoder_hidden_states, encoder_attention_mask, cache, **kwargs
            )[0],
        )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)
