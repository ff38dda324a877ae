"""Computing modules without calling them, where a call would run nothing but their own code.

Shapes: B sentences · Q, K query and key positions · H heads · E head size.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers_vanilla_transformer import Attention, Layer

# Makes a function that computes a plain linear layer.
Linear = Callable[[nn.Linear], Callable[[Tensor], Tensor]]


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


def plain_linear(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The product with the weight, as it is stored."""
    return partial(F.linear, weight=module.weight, bias=module.bias)


def direct_call(module: nn.Module, linear: Linear) -> Callable[..., Any]:
    """A function that computes `module`, without the overhead of `nn.Module` where possible.

    In a small model that overhead is a third of a step's time. A module with hooks or a `forward`
    of its own is called. A layer's own `forward` runs, so that it is described in one place; only
    its submodules are replaced.
    """
    if not is_untouched(module):
        return module
    if isinstance(module, nn.Linear) and is_plain_linear(module):
        return linear(module)
    if isinstance(module, nn.Dropout) and not module.training:
        return lambda x: x
    if type(module).__module__ == Layer.__module__ and isinstance(module, (Layer, Attention)):
        return direct_copy(module, linear).forward
    return module.forward


def direct_copy(module: nn.Module, linear: Linear) -> Any:
    """A shallow copy of `module` whose submodules are plain functions; see `direct_call`."""
    direct = copy.copy(module)
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            vars(direct)[name] = [direct_call(part, linear) for part in child]
        else:
            vars(direct)[name] = direct_call(child, linear)
    if isinstance(module, Attention):
        name = module.config._attn_implementation
        if ALL_ATTENTION_FUNCTIONS.get(name) is sdpa_attention_forward:
            direct.kernel = _run_torch_kernel  # type: ignore[assignment]
    return direct


def _run_torch_kernel(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float,
    attn_implementation: str,
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`, for masks that leave nothing to find out."""
    heads = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling
    )
    return heads.transpose(1, 2), None
