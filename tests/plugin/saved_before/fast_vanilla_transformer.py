"""`Fast`: the computations of `Plain`, from the files named `fast_*`."""

from typing import Any

from torch import Tensor, nn

from .fast_layers_vanilla_transformer import (
    Dropout,
    WeightLayouts,
    is_transformed,
    run_fast_kernel,
)
from .fast_loss_vanilla_transformer import projected_loss_sum
from .fast_search_vanilla_transformer import search_of_generate
from .layers_vanilla_transformer import Attention
from .plain_vanilla_transformer import LossTerms, Plain


class Fast(Plain):
    """Computes what `Plain` does in less time and memory."""

    def __init__(self) -> None:
        self.layouts = WeightLayouts()

    def prepare(self, model: nn.Module) -> None:
        """Gives the model faster dropout and attention."""
        for module in list(model.modules()):
            if isinstance(module, Attention):
                vars(module)["kernel"] = run_fast_kernel
            for name, child in module.named_children():
                if type(child) is nn.Dropout:
                    setattr(module, name, Dropout(child.p))

    def loss(
        self, lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, terms: LossTerms
    ) -> Tensor:
        """As `Plain.loss`, without holding the logits of all targets."""
        # Training will change the weights.
        self.layouts.clear()
        if is_transformed():
            return super().loss(lm_head, hidden_states, labels, terms)
        compiler = self.loss_compiler if hidden_states.device.type == "cuda" else None
        return projected_loss_sum(lm_head, hidden_states, labels, terms, compiler)

    def search(self, model: Any, *arguments: Any, **inputs: Any) -> Tensor | None:
        """As Transformers' searches, with the decoder run step by step; None: not this call."""
        return search_of_generate(model, *arguments, **inputs)
