"""How often some work makes the host wait for the device, which empties a GPU's queue."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Their results, or the shapes of their results, depend on values.
WAITING = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select")}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


# Methods that copy a GPU's tensor to the host, and that dispatch nothing on a CPU.
COPYING = ("cpu", "tolist")


class Waits(TorchDispatchMode):
    """Collects the operations that would make the host wait for a GPU; works on a CPU too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._patches = ExitStack()

    def __enter__(self) -> "Waits":
        for name in COPYING:
            self._patches.enter_context(patch.object(Tensor, name, self._counted(name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _counted(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            return method(tensor, *args, **kwargs)

        return counted

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.name().partition(".")[0]
        if name in WAITING or (
            name in INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1])
        ):
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


def waits_of(work: Callable[[], Any]) -> list[str]:
    """Names of the waiting operations, in their order."""
    with Waits() as waits:
        work()
    return waits.names


def warned_waits(work: Callable[[], Any]) -> int | None:
    """How often CUDA itself reports that the host waits; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)
