"""Whether a module may be bypassed, that is, computed without calling it."""

from torch import nn


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs the `forward` of its class and nothing else.

    A module that is hooked, patched or compiled has to be called.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    # Accelerate's hooks (offload) set another `forward` on the instance.
    is_patched = "forward" in vars(module)
    return not (any(hooks) or is_patched or module._compiled_call_impl is not None)


def holds_only_known_code(part: nn.Module) -> bool:
    """Whether all modules are torch's or this package's own, and none is hooked or patched."""
    known = ("torch.nn.", "transformers.activations.", f"{__name__.rpartition('.')[0]}.")
    return all(
        f"{type(module).forward.__module__}.".startswith(known) and is_untouched(module)
        for module in part.modules()
    )
