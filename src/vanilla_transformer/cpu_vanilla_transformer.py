"""Dropout and linear maps that are fast on a CPU; none of it changes a result.

Shapes: D input width of a linear map.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shortcuts_vanilla_transformer import has_plain_weight, is_transformed, is_untouched

# Products in bfloat16 get a multiple of this many rows.
ROW_BLOCK = 64
# Smaller weights stay in the processor's cache.
FEWEST_ENTRIES = 2**19


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


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of `x`: autocast's, or that of `x`."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def fill_rows(x: Tensor) -> Tensor:
    """Adds rows of zeros to `[rows, D]` up to a multiple of `ROW_BLOCK`.

    For products in bfloat16 on a CPU. oneDNN compiles a product for each new number of rows, which
    takes as long as the product and permanently occupies megabytes of memory.
    """
    missing = -len(x) % ROW_BLOCK
    # F.pad would first fill all rows with zeros.
    return torch.cat((x, x.new_zeros(missing, x.shape[1]))) if missing else x


class FirstRows(torch.autograd.Function):
    """The first rows of `[rows, D]`: the inverse of `fill_rows`.

    The gradient of a slice would be filled with zeros and then overwritten.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        """`[rows and filling, D]` -> `[rows, D]`."""
        return x[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Fills the gradient up."""
        return fill_rows(gradient), None


def linear(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`module(x)`; in bfloat16 training on a CPU, products have few different shapes.

    The module itself is torch's `nn.Linear`, because programs that quantise models replace no
    subclass of it.

    Args:
        module: A linear map, or what has taken its place, such as LoRA's or that of a search.
        x: `[..., in]`.

    Returns:
        `[..., out]`.
    """
    if (
        not isinstance(module, nn.Module)
        or not module.training
        or x.device.type != "cpu"
        or product_dtype(x) != torch.bfloat16
        or torch.compiler.is_compiling()
        or is_transformed()
        # Hooks see what the model computes.
        or not is_untouched(module)
    ):
        return module(x)
    rows = x.to(torch.bfloat16).flatten(0, -2)
    mapped = FirstRows.apply(module(fill_rows(rows)), len(rows))  # type: ignore[no-untyped-call]
    return mapped.unflatten(0, x.shape[:-1])


def _edges(weight: Tensor) -> tuple[Tensor, Tensor]:
    """First column and first row."""
    return weight[:, 0], weight[0]


class WeightForFewRows:
    """A weight `[out, in]` of a linear map, laid out for products with few rows on a CPU.

    Decoding multiplies each matrix by one row or a few, and most of the time goes into reading the
    matrix. The output projection of a base model takes 13 ms for 5 rows on two cores; this takes 4.
    Each of the two layouts needs as much memory as the weight, and is made when it is first used.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self._version = weight._version
        self._edges = [edge.clone() for edge in _edges(self.weight)]
        out, width = weight.shape
        # With more rows the layout makes no difference.
        self.most_rows = 128 if out >= 8 * width else 8

    def is_of(self, weight: Tensor) -> bool:
        """Whether `weight` is what was laid out, with the same values.

        Its version counts changes in place, except those through `weight.data`, with which running
        averages are often swapped in. The first column and the first row show these.
        """
        return (
            weight.data_ptr() == self.weight.data_ptr()
            and weight._version == self._version
            and all(map(torch.equal, _edges(weight), self._edges))
        )

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
        """The layout that oneDNN prefers."""
        return torch.ops.mkldnn._reorder_linear_weight(self.weight, 8)

    @cached_property
    def columns(self) -> Tensor:
        """Column by column, if columns are longer than rows."""
        out, width = self.weight.shape
        return self.weight.t().contiguous().t() if out > width else self.weight


class WeightLayouts:
    """The weights of one model that are laid out for few rows.

    The model owns them, so they live as long as it does. Copies and pickles of the model start
    without any.
    """

    def __init__(self) -> None:
        self._laid_out: WeakKeyDictionary[nn.Linear, WeightForFewRows] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as an empty object."""
        return type(self), ()

    def clear(self) -> None:
        """Frees the memory of all layouts."""
        self._laid_out.clear()

    def linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        """The map of `module`, for inference with few rows at a time.

        Args:
            module: A plain linear layer: no hooks, no `forward` of its own.
        """
        weight = module.weight
        if not has_plain_weight(module):
            return module.forward
        if (
            weight.device.type != "cpu"
            or weight.dtype != torch.float32
            or weight.numel() < FEWEST_ENTRIES
            or weight.is_inference()
            or not torch.backends.mkldnn.is_available()
        ):
            return partial(F.linear, weight=weight, bias=module.bias)
        laid_out = self._laid_out.get(module)
        if laid_out is None or not laid_out.is_of(weight):
            laid_out = self._laid_out[module] = WeightForFewRows(weight)
        return partial(laid_out.linear, bias=module.bias)
