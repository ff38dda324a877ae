"""Masks and keys in the form that each attention kernel takes; none of it changes a result.

Shapes: B batch · S source · T target · K key positions · H heads · E head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import is_flash_attention_requested

from .configuration_vanilla_transformer import VanillaTransformerConfig


def drop_padding(
    key: Tensor, value: Tensor, attention_mask: Tensor, query_length: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Lays the keys and values of real source tokens end to end, as flash kernels want them.

    Left to itself, Transformers' `_upad_input` takes the source's mask for one of the target
    too, and drops or mixes up queries.

    Args:
        key: `[B, H, S, E]`.
        value: `[B, H, S, E]`.
        attention_mask: 1 = real source token, `[B, S]`.
        query_length: Target positions T of each sentence; all are kept.

    Returns:
        Keys and values, each `[1, H, K, E]` with the real tokens K of the batch, and where
        each sentence begins, by the names of `FlashAttentionKwargs`.
    """
    is_real = attention_mask.bool()
    key, value = (x.transpose(1, 2)[is_real].transpose(0, 1)[None] for x in (key, value))
    source_lengths = is_real.sum(-1)
    ends = torch.arange(len(is_real) + 1, device=key.device)
    return (
        key,
        value,
        {
            "cu_seq_lens_q": (ends * query_length).int(),
            "cu_seq_lens_k": F.pad(source_lengths.cumsum(0), (1, 0)).int(),
            "max_length_q": query_length,
            "max_length_k": int(source_lengths.max()),
        },
    )


def causal_mask(
    config: VanillaTransformerConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> Any:
    """Mask of the self-attention in the form that the kernel of `config` takes.

    Two kernels would otherwise attend to the empty end of a static cache.

    Args:
        config: As `attention_config` gives it.
        inputs_embeds: `[B, T, D]`.
        attention_mask: 1 = real token, `[B, past + T]`; None: all are.
        cache: Of the self-attention.
    """
    if cache is None or not cache.is_compileable:
        return create_causal_mask(config, inputs_embeds, attention_mask, cache)
    past_length = cache.get_seq_length()
    if attention_mask is None and is_flash_attention_requested(config):
        # Flash kernels take no mask for leave to attend to all keys.
        size = (len(inputs_embeds), int(past_length) + inputs_embeds.shape[1])
        attention_mask = inputs_embeds.new_ones(size)
    mask = create_causal_mask(config, inputs_embeds, attention_mask, cache)
    if config._attn_implementation == "flex_attention" and isinstance(past_length, Tensor):
        # A flex mask reads the past length as late as the kernels run: the cache, which counts
        # on in place, gets a tensor of its own.
        cache.layers[0].cumulative_length = past_length.clone()
    return mask
