"""A GPU that is not there: its tensors are computed on the CPU, by the rules of a GPU.

Operations on tensors of two devices raise, and those that make the host wait for the device are
counted. torch's own fake CUDA tensors have no values, which a search needs, and in a build without
CUDA no backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vanilla_transformer import modules_vanilla_transformer

# A kind of device that every build of torch knows, and that no code treats in a way of its own.
DEVICE = torch.device("lazy", 0)
# Their results, or the shapes of their results, depend on values.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class OnDevice(Tensor):
    """A tensor of the device, whose values are `on_cpu`."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> Self:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=DEVICE,
        )
        tensor.on_cpu = on_cpu
        return tensor

    def tolist(self) -> Any:
        """torch's own knows no subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{operation} on the device needs `with pretended_device()`")


class PretendedDevice(TorchDispatchMode):
    """Computes the tensors of the device.

    Attributes:
        waits: Operations that made the host wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled():
            # Operations that consist of others come whole.
            with self:
                result = operation.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = operation.name().removeprefix("aten::").partition(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = {id(tensor.on_cpu): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
        if kwargs.get("device") is not None:
            to_device = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = torch.device("cpu")
        elif name == "copy_":
            to_device = isinstance(args[0], OnDevice)
        else:
            to_device = bool(ours)
        if name in ("_to_copy", "copy_"):
            self._note_copy(name, to_device, len(tensors) - len(ours), bool(ours), args, kwargs)
        elif ours:
            others = [one for one in tensors if not isinstance(one, OnDevice)]
            self._check(name, args, kwargs, others)
        args, kwargs = tree_map_only(OnDevice, lambda one: one.on_cpu, (args, kwargs))
        result = operation(*args, **kwargs)
        if not to_device:
            return result
        # An operation in place returns the tensor that it was given.
        return tree_map_only(
            Tensor, lambda one: ours[id(one)] if id(one) in ours else OnDevice(one), result
        )

    def _note_copy(
        self, name: str, to_device: bool, others: int, has_ours: bool, args: Any, kwargs: Any
    ) -> None:
        """A copy to the device waits if it is blocking, one from it always."""
        is_blocking = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
        if to_device and others and is_blocking:
            self.waits.append(f"{name} to the device")
        elif has_ours and not to_device:
            self.waits.append(f"{name} from the device")

    def _check(self, name: str, args: Any, kwargs: Any, others: list[Tensor]) -> None:
        """As on a GPU, single numbers may be on the CPU; so may indices, which are copied."""
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waits.append(name)
        elif name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.waits.append(f"Boolean {name}")
            copied = [index for index in indices if not isinstance(index, OnDevice)]
            self.waits += [f"{name} by an index of the CPU"] * len(copied)
            others = [one for one in others if not any(one is index for index in copied)]
        if any(one.dim() for one in others):
            raise RuntimeError(f"{name} got tensors of {DEVICE} and of the CPU")


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """The device exists meanwhile; nothing is computed under autocast."""
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled

    def autocast_of_known(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == DEVICE.type:
            return nullcontext()
        return autocast(device_type, *args, **kwargs)

    def is_enabled_if_known(device_type: str = "cuda") -> bool:
        return device_type != DEVICE.type and is_enabled(device_type)

    with pytest.MonkeyPatch.context() as patch, PretendedDevice() as device:
        patch.setattr(torch, "autocast", autocast_of_known)
        patch.setattr(torch, "is_autocast_enabled", is_enabled_if_known)
        # A GPU's weights are plain parameters.
        patch.setattr(modules_vanilla_transformer, "has_plain_weight", lambda module: True)
        # `torch.tensor(..., device=...)` then copies before our eyes.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


def put(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch on the device, without a wait."""
    return {name: OnDevice(tensor) for name, tensor in batch.items()}


def move(model: Any) -> Any:
    """Puts all parameters of the model on the device, tied ones together; returns the model."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        assert not module._buffers
        for name, weight in module._parameters.items():
            if weight is not None and weight not in moved:
                moved[weight] = nn.Parameter(OnDevice(weight.detach()), weight.requires_grad)
            module._parameters[name] = None if weight is None else moved[weight]
    return model
