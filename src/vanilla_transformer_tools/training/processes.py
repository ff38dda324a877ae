"""Several processes that train together: how long they wait, and how FSDP2 divides a model.

Functions on tensors take undivided models' tensors too, and then need no other process. Divided
ones are told by a method of theirs, because the import of their class takes long.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, distributed, nn
from transformers import Trainer, TrainingArguments


def limit_waiting(arguments: TrainingArguments) -> None:
    """Makes gloo follow `--ddp_timeout`, which Trainer drops with `--use_cpu`.

    Otherwise processes would wait half an hour for a machine that is gone.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_backend() == "gloo":
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(arguments.ddp_timeout_delta)


def is_sharded(trainer: Trainer) -> bool:
    """Whether a trainer divides its model among processes.

    Raises:
        ValueError: If it does so in a way that training cannot follow.
    """
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "A model is divided among processes by FSDP2, got DeepSpeed. Launch training by "
            "`accelerate launch --config_file examples/launch/fsdp.yaml`."
        )
    if not trainer.is_fsdp_enabled:
        return False
    plugin = trainer.accelerator.state.fsdp_plugin
    conditions = {
        "FSDP must have version 2, got 1. Set `fsdp_version: 2` for the launcher.": (
            plugin.fsdp_version != 2
        ),
        "Weights must keep their names, got `fsdp_activation_checkpointing: true`. Set it to "
        "false for the launcher.": plugin.activation_checkpointing,
        "Each process must begin with all weights, got `fsdp_cpu_ram_efficient_loading: true`. "
        "Set it to false for the launcher.": plugin.cpu_ram_efficient_loading,
        "--peft needs whole weights in each process, to merge the adapter; FSDP divides them. "
        "Leave one of the two out.": hasattr(trainer.model, "peft_config"),
    }
    faults = [fault for fault, is_so in conditions.items() if is_so]
    if faults:
        raise ValueError("\n".join(faults))
    return True


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all processes must call it."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def divided_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor on the device of another one, and divided as that one is.

    Args:
        tensor: Whole, and the same in all processes; or already divided.
        other: Tensor of the same shape.
    """
    tensor = tensor.to(other.device)
    if hasattr(tensor, "full_tensor") or not hasattr(other, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Each process has the whole tensor and keeps its part, so none is sent.
    mesh, placements = other.device_mesh, other.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a model.

    Args:
        model: Weights that are not given stay.
        weights: By name; of tied ones, any name will do.
    """
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in weights:
                tensor.copy_(divided_like(weights[name], tensor))
