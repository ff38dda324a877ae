"""What attention kernels and CPUs ask for beyond the paper; none of it changes a result.

Shapes: B batch · S source · T target · Q, K query and key positions · H heads · E head size.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import is_flash_attention_requested

from .configuration_vanilla_transformer import VanillaTransformerConfig

# Weights laid out for few rows, for as long as the weights themselves live.
LAID_OUT = WeakIdKeyDictionary()
# Rows of a product in bfloat16 on a CPU are a multiple of it.
ROW_BLOCK = 64
# Smaller ones stay in the processor's cache.
FEWEST_ENTRIES = 2**19


class Dropout(nn.Dropout):
    """Dropout with a mask that is cheap on a CPU.

    torch draws a float per entry there, a tenth of the time of a small model's training step. Here
    16 random bits decide on an entry, so that the rate is exact to 1 / 65536.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drops entries while training and scales up the others."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        quadruples = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        bits = quadruples.view(torch.int16)[: x.numel()].view(x.shape)
        dropped = round(self.p * 2**16)
        scale = 2**16 / (2**16 - dropped)
        return x * ((bits >= dropped - 2**15).to(x.dtype) * scale)


def product_dtype(x: Tensor) -> torch.dtype:
    """What a product of `x` is computed in: autocast's dtype, or its own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def fill_rows(x: Tensor) -> Tensor:
    """Adds rows of zeros to `[rows, D]` up to a multiple of `ROW_BLOCK`.

    For products in bfloat16 on a CPU: oneDNN compiles each anew for every number of rows that it
    has not seen lately, which takes as long as the product and megabytes of memory that it keeps.
    """
    missing = -len(x) % ROW_BLOCK
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class Linear(nn.Linear):
    """A linear map whose products in bfloat16 come in few shapes while a CPU trains it."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        if (
            not self.training
            or x.device.type != "cpu"
            or product_dtype(x) != torch.bfloat16
            or torch.compiler.is_compiling()
        ):
            return super().forward(x)
        rows = x.to(torch.bfloat16).flatten(0, -2)
        mapped = super().forward(fill_rows(rows))
        return mapped[: len(rows)].unflatten(0, x.shape[:-1])


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


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs the `forward` of its class and nothing else.

    A module that is hooked, patched or compiled has to be called: no shortcut may pass it by.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    # Accelerate's hooks (offload) put a `forward` of their own on the instance.
    is_patched = "forward" in vars(module)
    return not (any(hooks) or is_patched or module._compiled_call_impl is not None)


class WeightForFewRows:
    """A weight `[out, in]` of a linear map, laid out anew for products with few rows on a CPU.

    Decoding multiplies a row or a few by each matrix, and the time goes into reading the matrix:
    13 ms for the output projection of 5 rows of a base model on two cores, 4 ms here. Each of the
    two layouts takes the memory of the weight once more, and is made when it is first needed.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        out, width = weight.shape
        # Beyond so many rows the layout does not matter.
        self.most_rows = 128 if out >= 8 * width else 8

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.numel() // x.shape[-1]
        if rows > self.most_rows:
            return F.linear(x, self.weight, bias)
        if rows > 1:
            return torch.ops.mkldnn._linear_pointwise(x, self.blocks, bias, "none", [], "")
        return F.linear(x, self.columns, bias)

    @cached_property
    def blocks(self) -> Tensor:
        """As oneDNN likes it."""
        return torch.ops.mkldnn._reorder_linear_weight(self.weight, 8)

    @cached_property
    def columns(self) -> Tensor:
        """Column by column, if that makes longer runs through memory."""
        out, width = self.weight.shape
        return self.weight.t().contiguous().t() if out > width else self.weight


def linear_for_few_rows(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The map of `module`, for inference with few rows at a time.

    Args:
        module: A plain linear layer: no hooks, no `forward` of its own.
    """
    weight = module.weight
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or weight.numel() < FEWEST_ENTRIES
        or weight.is_inference()
        or not torch.backends.mkldnn.is_available()
    ):
        return partial(F.linear, weight=weight, bias=module.bias)
    # What changes a weight in place counts its version up.
    state = (weight.data_ptr(), weight._version)
    known_state, laid_out = LAID_OUT.get(weight, (None, None))
    if state != known_state:
        laid_out = WeightForFewRows(weight)
        LAID_OUT[weight] = state, laid_out
    return partial(laid_out.linear, bias=module.bias)
