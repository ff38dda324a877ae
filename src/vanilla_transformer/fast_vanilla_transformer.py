"""`FastBackend`: kernels, layouts of weights and the loss in chunks, where a device gains."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .backend_vanilla_transformer import PackageBackend
from .fast_layers_vanilla_transformer import Dropout, WeightLayouts, is_transformed, run_fast_kernel
from .fast_loss_vanilla_transformer import projected_loss_sum
from .layers_vanilla_transformer import Attention
from .loss_vanilla_transformer import LossTerms


class FastBackend(PackageBackend):
    """Computes what `PackageBackend` does in less time and memory."""

    def __init__(self) -> None:
        self.layouts = WeightLayouts()
        self.compiler: Any = None

    def prepare(self, model: nn.Module) -> None:
        """Gives the model faster dropout and attention."""
        for module in list(model.modules()):
            if isinstance(module, Attention):
                module.kernel = run_fast_kernel
            for name, child in module.named_children():
                if type(child) is nn.Dropout:
                    setattr(module, name, Dropout(child.p))

    def compile_loss(self, compiler: Any) -> None:
        """Compiles softmax and loss on a GPU by this backend of `torch.compile`."""
        self.compiler = compiler

    def loss(
        self, lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, terms: LossTerms
    ) -> Tensor:
        """As `Backend.loss`, without holding the logits of all targets."""
        # Training will change the weights.
        self.layouts.clear()
        if is_transformed():
            return super().loss(lm_head, hidden_states, labels, terms)
        compiler = self.compiler if hidden_states.device.type == "cuda" else None
        return projected_loss_sum(lm_head, hidden_states, labels, terms, compiler)

    def linear(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        """A function that computes a plain linear layer for few rows, as decoding has."""
        return self.layouts.linear(module)
