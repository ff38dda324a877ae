"""Muon for the matrices of the layers and Adam for all else, as one optimizer.

Muon (Jordan et al. 2024) averages the gradients of a matrix over updates, and moves the matrix
equally far in all directions of that average: all its singular values become about 1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer
from transformers import PreTrainedModel, Trainer

# Values of --optim that are Adam.
ADAM = ("adamw_torch", "adamw_torch_fused")


class MuonAndAdam(Optimizer):
    """Two optimizers as one: saved, scheduled, clipped and scaled like any other.

    Args:
        adam: Adam with its parameters, whose groups are the first ones here: reports show the rate
            of the first.
        matrices: Parameters of Muon, `[rows, columns]`, each with the row counts of the matrices
            that are stacked in it.
        muon: Options of Muon.
    """

    def __init__(
        self,
        adam: Optimizer,
        matrices: Mapping[nn.Parameter, tuple[int, ...]],
        **muon: Any,
    ) -> None:
        self.adam, self.muon, self.row_counts = adam, Muon(matrices, **muon), matrices
        super().__init__([*adam.param_groups, *self.muon.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns the value of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a checkpoint replaces groups and state.
        *groups, matrices = self.param_groups
        self.adam.param_groups, self.adam.state = groups, self.state
        self.adam.step()
        self._step_matrices(matrices)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Updates each of the stacked matrices by itself, as views of what is stored together."""
        momenta: dict[Tensor, dict[str, Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            stacked = (parameter.detach(), parameter.grad, state["momentum_buffer"])
            cut = (tensor.split(self.row_counts[parameter]) for tensor in stacked)
            for matrix, gradient, momentum in zip(*cut, strict=True):
                matrix.grad = gradient
                momenta[matrix] = {"momentum_buffer": momentum}
        self.muon.param_groups, self.muon.state = [{**group, "params": [*momenta]}], momenta
        self.muon.step()
        # They would keep the gradients in memory.
        self.muon.param_groups, self.muon.state = [], {}


def muon_and_adam(trainer: Trainer) -> MuonAndAdam:
    """The optimizer of `--optimizer muon`, with Trainer's rate, weight decay and options of Adam.

    Muon's rate is scaled by the shape of a matrix, so that its updates are as large as Adam's are
    (Liu et al. 2025, arXiv 2502.16982), and one rate suits both.

    Args:
        trainer: A trainer whose model is on its device.

    Raises:
        ValueError: If the matrices are divided among processes, or all are frozen.
    """
    arguments, model = trainer.args, trainer.model
    if trainer.is_fsdp_enabled:
        raise ValueError(
            "--optimizer muon needs whole matrices in each process; FSDP divides them. Leave one "
            "of the two out."
        )
    matrices = matrices_of_layers(model)
    if not matrices:
        raise ValueError(
            "--optimizer muon is for the matrices of the layers, and --freeze leaves none of them "
            "to train. Leave one of the two out."
        )
    decayed = trainer.get_decay_parameter_names(model)
    others: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in matrices:
            others[name in decayed].append(parameter)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    decay = arguments.weight_decay
    groups = [
        {"params": parameters, "weight_decay": decay if is_decayed else 0.0}
        for is_decayed, parameters in others.items()
    ]
    return MuonAndAdam(
        kind(groups, **options),
        matrices,
        lr=arguments.learning_rate,
        weight_decay=decay,
        adjust_lr_fn="match_rms_adamw",
    )


def matrices_of_layers(model: PreTrainedModel) -> dict[nn.Parameter, tuple[int, ...]]:
    """Trained weights of linear layers, each with the row counts of the matrices stacked in it.

    The output projection is a table of the vocabulary, tied to the embeddings or not.
    """
    output = model.get_output_embeddings()
    return {
        module.weight: getattr(module, "row_counts", (module.out_features,))
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not output and module.weight.requires_grad
    }
