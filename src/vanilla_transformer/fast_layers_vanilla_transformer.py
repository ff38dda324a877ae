"""Dropout, attention kernels and decoding's weights for devices that are slow with the plain ones.

Shapes: B batch · S source · T target · K key positions · H heads · E head size.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .layers_vanilla_transformer import Attention, run_kernel
from .modules_vanilla_transformer import plain_linear

# Smaller weights stay in the processor's cache.
FEWEST_ENTRIES = 2**19


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs. They refuse custom gradients and checkpoints."""
    try:
        return torch._C._functorch.peek_interpreter_stack() is not None
    except AttributeError:
        return False


class Dropout(nn.Dropout):
    """Dropout with a mask that is cheap on a CPU.

    torch draws a float per entry, which takes a tenth of a small model's training step. Here 16
    random bits decide on each entry, so the rate is exact to 1 / 65536.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Drops entries while training and scales up the others."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
            return super().forward(x)
        quadruples = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        bits = quadruples.view(torch.int16)[: x.numel()].view(x.shape)
        dropped = round(self.p * 2**16)
        scale = 2**16 / (2**16 - dropped)
        return x * ((bits >= dropped - 2**15).to(x.dtype) * scale)


def run_fast_kernel(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `run_kernel`, in float32 for a backward pass on a CPU."""
    device, dtype = query.device.type, query.dtype
    # The backward pass of torch's CPU kernel is ten times slower in bfloat16 than in float32.
    widened = device == "cpu" and query.requires_grad and dtype.itemsize < 4
    if widened:
        query, key, value = (x.float() for x in (query, key, value))
        if isinstance(attention_mask, Tensor) and attention_mask.dtype == dtype:
            # A mask of numbers, which must not be narrower than the queries.
            attention_mask = attention_mask.float()
    with torch.autocast(device, enabled=False) if widened else nullcontext():
        heads, weights = run_kernel(module, query, key, value, attention_mask, **kwargs)
    return heads.to(dtype), weights


class LaidOutWeight:
    """A weight `[out, in]` of a linear map in the layout that oneDNN prefers, for few rows.

    Decoding multiplies each matrix by one row or a few, and most of the time goes into reading the
    matrix. The output projection of a base model takes 9 ms for 4 rows on one core; this takes 2.5.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self.product = torch.ops.mkldnn._linear_pointwise
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(self.weight, 8)
        self.version = weight._version
        self.edges = self.weight[:, 0].clone(), self.weight[0].clone()

    def is_of(self, weight: Tensor) -> bool:
        """Whether `weight` was laid out before, with the same values.

        Its version counts changes in place, except those through `weight.data`, with which running
        averages are often swapped in. The first column and the first row show these.
        """
        is_same = (weight.data_ptr(), weight._version) == (self.weight.data_ptr(), self.version)
        return is_same and all(map(torch.equal, (weight[:, 0], weight[0]), self.edges))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        laid_out: Tensor = self.product(x, self.blocks, bias, "none", [], "")
        return laid_out


class WeightLayouts:
    """The weights of one model that are laid out for few rows.

    The model owns them, so they live as long as it does. Copies and pickles of the model start
    without any.
    """

    def __init__(self) -> None:
        self._laid_out: WeakKeyDictionary[nn.Linear, LaidOutWeight] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as an empty object."""
        return type(self), ()

    def clear(self) -> None:
        """Frees the memory of all layouts."""
        self._laid_out.clear()

    def linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        """The map of a plain linear layer, for inference with few rows at a time."""
        weight = module.weight
        plain = plain_linear(module)
        if (
            weight.device.type != "cpu"
            or weight.dtype != torch.float32
            or weight.numel() < FEWEST_ENTRIES
            or weight.is_inference()
            or not torch.backends.mkldnn.is_available()
            or torch.is_autocast_enabled("cpu")
        ):
            return plain
        laid_out = self._laid_out.get(module)
        if laid_out is None or not laid_out.is_of(weight):
            try:
                laid_out = self._laid_out[module] = LaidOutWeight(weight)
            except AttributeError:
                # Operators of torch that are not documented, and that a release may lack.
                return plain
        return partial(laid_out.linear, bias=module.bias)
