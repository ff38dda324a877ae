"""Muon for the matrices of the layers and Adam for all else, as one optimizer.

Muon (Jordan et al. 2024) averages the gradients of a matrix over updates, and moves the matrix
about equally far in all directions of that average. `torch.optim.Muon` always computes in bfloat16,
which takes 16 times as long as float32 on a CPU that emulates it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Trainer

from vanilla_transformer.layers_vanilla_transformer import Attention

# Row counts and column counts of the matrices that a parameter consists of.
Cuts = tuple[tuple[int, ...], tuple[int, ...]]
# Values of --optim that are Adam.
ADAM = ("adamw_torch", "adamw_torch_fused")
# Muon's own: share of the average that an update keeps, and coefficients of an iteration.
_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
# Of that of the run; measured in lab/2026-11-29_settings_of_muon.md.
_RATE_OF_TABLES = 2.0


class MuonAndAdam(Optimizer):
    """Two optimizers as one: saved, scheduled, clipped and scaled like any other.

    Muon's rate is scaled by the shape of a matrix, so that its updates are as large as Adam's
    usually are (Liu et al. 2025, arXiv 2502.16982): one rate suits both.

    Args:
        adam: Adam with its parameters, whose groups are the first ones here: reports show the rate
            of the first.
        matrices: Parameters of Muon, `[rows, columns]`, each with the row counts and the column
            counts of the matrices that it consists of.
        lr: Muon's learning rate, for a start.
        weight_decay: Muon's weight decay, times the rate.
        dtype: Dtype of the products that an update needs.
    """

    def __init__(
        self,
        adam: Optimizer,
        matrices: Mapping[Tensor, Cuts],
        lr: float,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.adam, self.dtype = adam, dtype
        # In the order of the parameters.
        self.cuts = [*matrices.values()]
        group = {"params": [*matrices], "lr": lr, "weight_decay": weight_decay}
        super().__init__([*adam.param_groups, group], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        # Loading a checkpoint replaces groups and state.
        *groups, matrices = self.param_groups
        self.adam.param_groups, self.adam.state = groups, self.state
        self.adam.step()
        self._step_matrices(matrices)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Muon's update of each single matrix; those of one shape are computed together."""
        updates: list[tuple[Tensor, Tensor]] = []
        alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter, cuts in zip(group["params"], self.cuts, strict=True):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            average = state["momentum_buffer"].lerp_(parameter.grad, 1 - _MOMENTUM)
            # Nesterov's momentum.
            update = parameter.grad.lerp(average, _MOMENTUM)
            updates.append((parameter, update))
            for matrix in cut_up(update, *cuts):
                alike[matrix.shape].append(matrix)
        for shape, matrices in alike.items():
            steps = orthogonalized(matrices, self.dtype) * (0.2 * max(shape) ** 0.5)
            for matrix, step in zip(matrices, steps, strict=True):
                matrix.copy_(step)
        for parameter, update in updates:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"])


def cut_up(stacked: Tensor, rows: Sequence[int], columns: Sequence[int]) -> list[Tensor]:
    """The matrices of a parameter, as views."""
    return [part for strip in stacked.split(rows) for part in strip.split(columns, dim=1)]


def orthogonalized(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Moves all singular values of matrices to about 1 (0.7 to 1.2), by Newton-Schulz iterations.

    Args:
        matrices: Matrices of one shape, `[rows, columns]` each.
        dtype: Dtype of the computation.

    Returns:
        `[matrices, rows, columns]` in that dtype.
    """
    x = torch.stack(tuple(matrices)).to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    # Then no singular value is above 1.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def muon_and_adam(trainer: Trainer) -> MuonAndAdam:
    """The optimizer of `--optimizer muon`, with Trainer's rate, weight decay and options of Adam.

    Tables have twice the rate, and only the matrices of the layers have weight decay. The model is
    on its device.

    Raises:
        ValueError: If all matrices are frozen.
    """
    arguments, model = trainer.args, trainer.model
    matrices = matrices_of_layers(model)
    if not matrices:
        raise ValueError(
            "--optimizer muon is for the matrices of the layers, and --freeze leaves none of them "
            "to train. Leave one of the two out."
        )
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(model.get_output_embeddings().weight)
    others: dict[bool, list[Tensor]] = {False: [], True: []}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in matrices:
            others[parameter in tables].append(parameter)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    rate = arguments.learning_rate
    groups = [
        {"params": parameters, "lr": rate * (_RATE_OF_TABLES if are_tables else 1.0)}
        for are_tables, parameters in others.items()
    ]
    return MuonAndAdam(
        kind(groups, **options, weight_decay=0.0),
        matrices,
        rate,
        arguments.weight_decay,
        torch.bfloat16 if arguments.bf16 else torch.float32,
    )


def matrices_of_layers(model: PreTrainedModel) -> dict[Tensor, Cuts]:
    """Trained weights of linear layers, each with the row and column counts of its matrices.

    Each head has matrices of its own, as in section 3.2.2 of the paper: smaller matrices cost less
    and learn as much.
    The output projection is a table of the vocabulary, tied to the embeddings or not.
    """
    cuts: dict[Tensor, Cuts] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            query, key, value = ((shape.size,) * shape.heads for shape in module.head_shapes)
            rows = {"qkv_proj": query + key + value, "q_proj": query, "kv_proj": key + value}
            for name, projection in module.named_children():
                if isinstance(projection, nn.Linear) and name in rows:
                    cuts[projection.weight] = (rows[name], (projection.in_features,))
            cuts[module.out_proj.weight] = ((module.out_proj.out_features,), value)
    output = model.get_output_embeddings()
    return {
        module.weight: cuts.get(module.weight, ((module.out_features,), (module.in_features,)))
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not output and module.weight.requires_grad
    }
