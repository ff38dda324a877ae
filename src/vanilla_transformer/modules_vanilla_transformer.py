"""Whether a module computes what its class says, so that code may compute it without a call."""

from torch import nn


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs the `forward` of its class and nothing else."""
    hooks = (
        *module._forward_hooks,
        *module._forward_pre_hooks,
        *module._backward_hooks,
        *module._backward_pre_hooks,
    )
    # Accelerate's hooks (offload) set another `forward` on the instance.
    return not hooks and "forward" not in vars(module)


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


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 changed the module's class. Not every torch can import that class."""
    return hasattr(type(module), "unshard")
