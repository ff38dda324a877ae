"""Averages of weights: of the last checkpoints, section 6.1 of the paper, or a moving one."""

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from vanilla_transformer_tools.saved_folder import shards_in
from vanilla_transformer_tools.settings import METRIC_TITLES
from vanilla_transformer_tools.training.checkpoints import (
    checkpoint_folder,
    closed_checkpoints,
    update_of,
    with_intact_weights,
)
from vanilla_transformer_tools.training.processes import divided_like, gathered, put_weights

# A file of each checkpoint.
MOVING_AVERAGE_FILE = "moving_average.safetensors"

# Percentage points within which a score says little: a model that begins to learn has a BLEU of
# 0.07 in one evaluation and of 0 in the next one, while its loss falls.
CHANCE = 5.0


@dataclass(frozen=True)
class Outcome:
    """The result of a run: where its weights come from, and their validation scores."""

    weights: str
    scores: dict[str, Any] | None = None


def best_weights(trainer: Trainer) -> Outcome:
    """The outcome of the weights that Trainer left in the model.

    Those of the best evaluation (`best_global_step`) were not saved if `save_steps` is a multiple
    of `eval_steps`; Trainer then loads the best of the checkpoints that it has, or none.
    """
    state = trainer.state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        best_update = update_of(state.best_model_checkpoint)
        return Outcome("best checkpoint", scores_of_update(trainer, best_update))
    return Outcome("last update", scores_of_update(trainer, state.global_step))


def scores_of_update(trainer: Trainer, step: int) -> dict[str, Any] | None:
    """Validation scores of the weights after an update; None if they were not evaluated."""
    found = [scores for scores in evaluations(trainer.state) if scores["step"] == step]
    return found[-1] if found else None


def evaluations(state: TrainerState) -> list[dict[str, Any]]:
    """Validation scores of a run so far, in their order, with names without `eval_`."""
    return [
        {name.removeprefix("eval_"): value for name, value in entry.items()}
        for entry in state.log_history
        if "eval_loss" in entry
    ]


def evaluations_since_best(state: TrainerState, arguments: TrainingArguments) -> int:
    """Number of evaluations after the best one, which is the first of equally good ones.

    This decides which checkpoint is the best, and when a run without progress ends. Equal scores
    are compared by loss, and so are scores within `CHANCE` of the worst possible one.

    Args:
        state: State of the run, with at least one evaluation.
        arguments: Trainer's arguments, with the metric and whether a greater one is better.
    """
    metric = metric_of(arguments)
    prefix, score = split_metric(metric)
    sign, worst = (1, 0) if arguments.greater_is_better else (-1, -100)

    def rank(scores: dict[str, Any]) -> tuple[float, float]:
        value = sign * scores[metric]
        value = value if score == "loss" else max(value, worst + CHANCE)
        return value, -scores[f"{prefix}loss"]

    ranks = [rank(scores) for scores in evaluations(state)]
    return len(ranks) - 1 - ranks.index(max(ranks))


def average_weights(trainer: Trainer, count: int, outcome: Outcome) -> Outcome:
    """Puts the mean of the last checkpoints into the model, unless scores say that it is worse.

    Args:
        trainer: After training; its model holds the weights of `outcome`.
        count: Number of checkpoints to average, or all if there are fewer; damaged ones are left
            out.
        outcome: Outcome of the run so far.

    Returns:
        The outcome whose weights the model now holds.
    """
    if count < 2:
        return outcome
    last = closed_checkpoints(Path(trainer.args.output_dir))[-count:]
    checkpoints = with_intact_weights(last)
    if len(checkpoints) < 2:
        return outcome
    weights = average_checkpoints(checkpoints)
    name = f"mean of the last {len(checkpoints)} checkpoints"
    if outcome.scores is None:
        put_weights(trainer.accelerator.unwrap_model(trainer.model), weights)
        return Outcome(name)
    return try_weights(trainer, weights, name, outcome)


def try_weights(
    trainer: Trainer, weights: dict[str, Tensor], name: str, outcome: Outcome
) -> Outcome:
    """Puts averaged weights into the model, if they are better on the validation pairs.

    Averages are worse early in training, while the weights still change much, so they are always
    evaluated. Better means a better score or a lower loss, and a loss that is finite. The score
    alone would favour the best checkpoint, which was chosen, partly by luck, on the same pairs;
    the loss varies much less.

    Args:
        trainer: After training; its model holds the weights of `outcome`.
        weights: By name; tied tensors once.
        name: Human-readable description of the weights.
        outcome: Outcome of the run so far; returned as it is if it has no scores.

    Returns:
        The outcome whose weights the model now holds.
    """
    if outcome.scores is None:
        return outcome
    model = trainer.accelerator.unwrap_model(trainer.model)
    before = copy.deepcopy(model.state_dict())
    put_weights(model, weights)
    scores = trainer.evaluate(metric_key_prefix="mean")
    scores = {key.removeprefix("mean_"): value for key, value in scores.items()}
    averaged = Outcome(name, scores)
    if _is_better(trainer.args, averaged, outcome):
        return averaged
    put_weights(model, before)
    return outcome


def prefer_last(trainer: Trainer, outcome: Outcome) -> Outcome:
    """Puts the last checkpoint into the model, unless its score and its loss are both worse.

    For a learning rate that ends at 0: then the last weights are the best on average, and what is
    better in the score of some hundred pairs alone is better partly by luck.

    Args:
        trainer: After training; its model holds the weights of `outcome`.
        outcome: The best checkpoint.

    Returns:
        The outcome whose weights the model now holds.
    """
    update = trainer.state.global_step
    last = Outcome("last update", scores_of_update(trainer, update))
    if not (last.scores and outcome.scores) or outcome.scores["step"] == update:
        return outcome
    folder = checkpoint_folder(Path(trainer.args.output_dir), update)
    if not (_is_better(trainer.args, last, outcome) and with_intact_weights([folder])):
        return outcome
    model = trainer.accelerator.unwrap_model(trainer.model)
    put_weights(model, average_checkpoints([folder]))
    return last


def _is_better(arguments: TrainingArguments, new: Outcome, old: Outcome) -> bool:
    """Whether weights have a better score or a lower loss than others; prints those of both."""
    metric = metric_of(arguments)
    name_of_loss = f"{split_metric(metric)[0]}loss"
    scores, earlier = new.scores or {}, old.scores or {}
    loss, earlier_loss = scores[name_of_loss], earlier[name_of_loss]
    PartialState().print(
        f"{metric:<11} {earlier[metric]:.4g}, loss {earlier_loss:.4g} ({old.weights}); "
        f"{scores[metric]:.4g}, loss {loss:.4g} ({new.weights})"
    )
    gain = scores[metric] - earlier[metric]
    is_better: bool = (gain if arguments.greater_is_better else -gain) > 0
    # Every comparison with NaN is false, so a score that is NaN is no better.
    return math.isfinite(loss) and (is_better or loss < earlier_loss)


def metric_of(arguments: TrainingArguments) -> str:
    """Name of the validation score that chooses checkpoints."""
    return (arguments.metric_for_best_model or "loss").removeprefix("eval_")


def split_metric(metric: str) -> tuple[str, str]:
    """The prefix of a further validation set, and the score: `news_bleu` is `news_` and `bleu`."""
    if metric in ("loss", *METRIC_TITLES):
        return "", metric
    name, _, score = metric.partition("_")
    return f"{name}_", score


def average_checkpoints(checkpoints: Sequence[Path]) -> dict[str, Tensor]:
    """Mean of the weights of several checkpoints of one model.

    The files are read one tensor at a time, so no whole checkpoint is in memory next to the result.
    Tied tensors occur once in a file and once in the result.

    Args:
        checkpoints: One folder or more with safetensors, sharded or not.

    Returns:
        The weights by name, each in the dtype of its file.

    Raises:
        ValueError: If two checkpoints have different tensors, or tensors of different shapes.
    """
    with ExitStack() as stack:
        models = [_open(folder, stack) for folder in checkpoints]
        shapes = [
            {name: file.get_slice(name).get_shape() for name, file in model.items()}
            for model in models
        ]
        for folder, other in zip(checkpoints, shapes, strict=True):
            if other != shapes[0]:
                every = shapes[0].keys() | other.keys()
                name = min(name for name in every if shapes[0].get(name) != other.get(name))
                raise ValueError(
                    f"Checkpoints of one model must hold the same tensors, got {name!r} of shape "
                    f"{shapes[0].get(name)} in {checkpoints[0]} and {other.get(name)} in {folder}. "
                    "Average checkpoints of one run."
                )
        return {name: _mean([each[name].get_tensor(name) for each in models]) for name in models[0]}


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor of a saved model."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = sorted({*shards_in(index).values()}) if index.exists() else [SAFE_WEIGHTS_NAME]
    files = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in names]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


class MovingAverage(TrainerCallback):
    """Exponential moving average of the weights: decay * old + (1 - decay) * new at each update.

    It begins with the weights of the first update, whose share after n more is decay^n.

    Args:
        decay: Share of the old average that stays; 0.999 looks back on about 1,000 updates.

    Attributes:
        weights: The average by name, in float32; tied tensors once, frozen ones not at all.
    """

    def __init__(self, decay: float) -> None:
        self.weights: dict[str, Tensor] = {}
        self._update = get_ema_multi_avg_fn(decay)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Loads the average from the checkpoint of a resumed run."""
        if state.global_step:
            resumed = checkpoint_folder(Path(args.output_dir), state.global_step)
            saved = load_file(resumed / MOVING_AVERAGE_FILE)
            # Updates pair tensors by position, and the file has another order than the model.
            self.weights = {
                name: divided_like(saved[name], weight) for name, weight in _trained(model).items()
            }

    def on_step_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        """Adds the weights of an update."""
        weights = {name: weight.detach().float() for name, weight in _trained(model).items()}
        if not self.weights:
            self.weights = {name: weight.clone() for name, weight in weights.items()}
        self._update(list(self.weights.values()), list(weights.values()), None)

    def save(self, checkpoint: Path, writes: bool) -> None:
        """Puts the average into a new checkpoint.

        Args:
            checkpoint: Folder of the checkpoint.
            writes: Whether this process does; all call it, because each may have a part.
        """
        whole = {}
        for name, weight in self.weights.items():
            tensor = gathered(weight)
            if writes:
                whole[name] = tensor.cpu()
        if writes:
            save_file(whole, checkpoint / MOVING_AVERAGE_FILE)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
