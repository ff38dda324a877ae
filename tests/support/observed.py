"""What goes through a module, seen without a hook: with one, Transformers' search would run."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def observe(module: nn.Module, see: Callable[[Tensor, Tensor], Any]) -> None:
    """Calls `see` with each first input of a module and its output."""

    class Observed(type(module)):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            see(x, output)
            return output

    module.__class__ = Observed
