"""Whether a module may be bypassed, that is, computed without calling it."""

from typing import Any

import torch
from torch import nn
from transformers.utils import output_capturing


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs. They refuse custom gradients and checkpoints."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs the `forward` of its class and nothing else.

    A module that is hooked, patched or compiled has to be called.
    """
    return _is_plain(module) and module._compiled_call_impl is None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module is the product with a weight and nothing else.

    Quantisers such as torchao replace the weight, whose products are then its own.
    """
    if is_sharded(module):
        return type(module).__bases__[1:] == (nn.Linear,)
    return type(module) is nn.Linear and has_plain_weight(module) and is_untouched(module)


def has_plain_weight(module: nn.Module) -> bool:
    """Whether the weight is torch's own parameter, not one with operations of its own."""
    return type(module.weight) is nn.Parameter


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks see or change what goes into the module or comes out of it.

    Of Transformers' own, those that a call with `output_attentions` leaves behind do neither.
    Gradient checkpointing adds one that only requires gradients, and NEFTune's acts in training.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not _is_idle(hook, module) for hook in hooks)


def _is_idle(hook: Any, module: nn.Module) -> bool:
    """Whether a hook of Transformers' leaves values as they are."""
    name = getattr(hook, "__qualname__", "")
    return (
        getattr(hook, "__module__", None) == output_capturing.__name__
        or name.endswith(".make_inputs_require_grads")
        or (name == "neftune_post_forward_hook" and not module.training)
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether the module is neither hooked nor patched."""
    backward_hooks = (*module._backward_hooks, *module._backward_pre_hooks)
    # Accelerate's hooks (offload) set another `forward` on the instance.
    is_patched = "forward" in vars(module) and not _is_under_autocast(module)
    return not (is_hooked(module) or backward_hooks or is_patched)


def _is_under_autocast(module: nn.Module) -> bool:
    """Whether `forward` is the class's in accelerate's two wrappers for mixed precision.

    That is autocast, and then outputs in float32. A search computes in the weights' own precision.
    """
    layer = vars(module)["forward"]
    if getattr(layer, "__module__", None) != "accelerate.utils.operations":
        return False
    # The outermost function, its wrapper that converts outputs, and that of autocast.
    for _ in range(3):
        layer = getattr(layer, "__wrapped__", None)
    return layer is type(module).forward


def holds_only_known_code(part: nn.Module) -> bool:
    """Whether all modules are torch's or this package's own, and none is hooked or patched.

    A compiled one is bypassed: it computes the same, and each step of a search has other shapes.
    """
    known = ("torch.nn.", "transformers.activations.")
    return all(
        (f"{type(module).__module__}.".startswith(known) or is_ours(module)) and _is_plain(module)
        for module in part.modules()
    )


def is_ours(module: nn.Module) -> bool:
    """Whether the module's class, FSDP's changes aside, is this package's and no subclass of it."""
    kind = type(module)
    if is_sharded(module):
        # Its own class comes before that of the module.
        kind = kind.__bases__[-1]
    return kind.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 changed the module's class. Not every torch can import that class."""
    return hasattr(type(module), "unshard")
