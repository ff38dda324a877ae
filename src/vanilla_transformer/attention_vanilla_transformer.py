"""Multi-head attention, section 3.2, and talking heads.

Shapes: B batch · S source · T target · Q, K query and key positions · D `d_model` · H heads ·
E head size (d_k or d_v).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .cpu_vanilla_transformer import linear
from .kernels_vanilla_transformer import drop_padding

# Which of query, key and value a projection yields.
ALL, QUERY, KEY_VALUE = slice(None), slice(1), slice(1, None)


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


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
        heads, weights = self.run_kernel(query, key, value, attention_mask, **kwargs)
        return linear(self.out_proj, heads.flatten(-2)), weights

    def run_kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_implementation: str,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the chosen kernel: the heads' outputs `[B, Q, H, E]`, and the weights or None."""
        kernel: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            attn_implementation, eager_attention_forward
        )
        device, dtype = query.device.type, query.dtype
        # The backward pass of torch's CPU kernel is ten times slower in bfloat16 than in float32.
        widened = device == "cpu" and query.requires_grad and dtype.itemsize < 4
        if widened:
            query, key, value = (_at_least_float32(x) for x in (query, key, value))
        with torch.autocast(device, enabled=False) if widened else nullcontext():
            heads, weights = kernel(
                self,
                query,
                key,
                value,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
        return heads.to(dtype), weights


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
        query, key, value = self.split_heads(linear(self.qkv_proj, hidden_states))
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
        (query,) = self.split_heads(linear(self.q_proj, hidden_states), QUERY)
        key, value = self.source_keys_and_values(encoder_hidden_states, past_key_values)
        kernel = kwargs["attn_implementation"]
        if attention_mask is not None and is_flash_attention_requested(None, kernel):
            key, value, lengths = drop_padding(key, value, attention_mask, query.shape[2])
            return self.attend(query, key, value, None, **lengths, **kwargs)
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
        key, value = self.split_heads(linear(self.kv_proj, encoder_hidden_states), KEY_VALUE)
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key, value
