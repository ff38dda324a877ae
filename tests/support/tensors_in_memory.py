"""What is in memory at once while tensors are computed."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorRecorder(TorchDispatchMode):
    """Adds up tensors that are in memory at once, in every operation.

    Attributes:
        most: The largest sum.

    Args:
        count: What a tensor counts.
    """

    def __init__(self, count: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.count = count
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (counted := self.count(tensor)):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = reference, counted
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(counted for _, counted in self.alive.values()))
        return result
