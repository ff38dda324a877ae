"""The matrix products of training steps, computed again without the rest of the steps."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A linear layer's forward and backward pass arrive as these; fused attention has its own.
_aten = torch.ops.aten
MATRIX_PRODUCTS = (_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_)


class MatrixProducts(TorchDispatchMode):
    """Records the matrix products of a function, in order, and computes them again on random data.

    Calls of equal shape share their operands, so these are likelier to lie in a cache of the
    processor than those of the function: what it can reach at most is overestimated, not
    underestimated.

    Args:
        work: Runs once, with its backward pass.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self._operands: dict[tuple[Any, ...], torch.Tensor] = {}
        with self:
            work()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation of torch, and keeps it if it is a matrix product."""
        kwargs = kwargs or {}
        if function.overloadpacket in MATRIX_PRODUCTS:
            operands = [self._operand(index, value) for index, value in enumerate(args)]
            named = {name: self._operand(name, value) for name, value in kwargs.items()}
            self._calls.append((function, operands, named))
        return function(*args, **kwargs)

    def _operand(self, place: int | str, value: Any) -> Any:
        """A tensor of the same layout, one for each place in the call; other values as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        layout = (place, value.dtype, value.device, value.shape, value.stride())
        if layout not in self._operands:
            pairs = zip(value.shape, value.stride(), strict=True)
            length = 1 + sum((size - 1) * stride for size, stride in pairs)
            memory = torch.randn(length, dtype=value.dtype, device=value.device)
            self._operands[layout] = memory.as_strided(value.shape, value.stride())
        return self._operands[layout]

    def run(self) -> float:
        """Seconds for all products."""
        started = time.perf_counter()
        with torch.no_grad():
            for function, operands, named in self._calls:
                function(*operands, **named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started
