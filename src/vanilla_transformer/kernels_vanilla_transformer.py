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
    """Joins the keys and values of real source tokens end to end, as flash kernels need them.

    Transformers' `_upad_input` would apply the source's mask to the target too, and drop or
    misplace queries.

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
    """Mask of the decoder's self-attention, in the form of the config's kernel.

    Without it, flash and flex attention would attend to the unused end of a static cache.

    Args:
        config: From `attention_config`.
        inputs_embeds: `[B, T, D]`.
        attention_mask: 1 = real token, `[B, past + T]`; None: all are.
        cache: Of the self-attention.
    """
    if cache is None or not cache.is_compileable:
        return create_causal_mask(config, inputs_embeds, attention_mask, cache)
    past_length = cache.get_seq_length()
    if attention_mask is None and is_flash_attention_requested(config):
        # Without a mask, flash kernels also attend to the unused end of the cache.
        size = (len(inputs_embeds), int(past_length) + inputs_embeds.shape[1])
        attention_mask = inputs_embeds.new_ones(size)
    mask = create_causal_mask(config, inputs_embeds, attention_mask, cache)
    if config._attn_implementation == "flex_attention" and isinstance(past_length, Tensor):
        # A flex mask reads the past length when kernels run, and the cache increments its length in
        # place. So the cache gets a copy.
        cache.layers[0].cumulative_length = past_length.clone()
    return mask
