"""How often a training step asks the device for a number, which empties a GPU's queue."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Their results, or the shapes of their results, depend on values.
WAITING = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select")}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Waits(TorchDispatchMode):
    """Collects the operations that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.name().partition(".")[0]
        if name in WAITING or (
            name in INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1])
        ):
            self.names.append(name)
        return operation(*args, **(kwargs or {}))


def test_training_step_waits_for_the_device_three_times(tiny_model, batch):
    with Waits() as waits:
        tiny_model.train()(**batch, num_items_in_batch=9).loss.backward()

    # Whether the sources have padding, asked by Transformers in each stack; where the targets are.
    assert waits.names == ["aten::_local_scalar_dense"] * 2 + ["aten::nonzero"]
