"""Validation scores of a run in order: which evaluation is the best, and how long ago it was."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments

from vanilla_transformer_tools.training.checkpoints import checkpoint_folder, closed_checkpoints

# Percentage points within which a score says little: a model that begins to learn has a BLEU of
# 0.07 in one evaluation and of 0 in the next one, while its loss falls.
CHANCE = 5.0

Scores = dict[str, Any]


def metric_of(arguments: TrainingArguments) -> str:
    """Name of the validation score that chooses checkpoints."""
    return (arguments.metric_for_best_model or "loss").removeprefix("eval_")


@dataclass(frozen=True)
class Ranking:
    """Order of the evaluations of a run.

    Attributes:
        arguments: Trainer's arguments, with the metric and whether a greater one is better.
        with_start: Whether the weights before the first update are a candidate: those of a saved
            model are, random ones are not.
    """

    arguments: TrainingArguments
    with_start: bool = False

    def evaluations(self, state: TrainerState) -> list[Scores]:
        """Validation scores of a run so far, in their order, with names without `eval_`."""
        return [
            {name.removeprefix("eval_"): value for name, value in entry.items()}
            for entry in state.log_history
            if "eval_loss" in entry and (entry["step"] or self.with_start)
        ]

    def of_update(self, state: TrainerState, step: int) -> Scores | None:
        """Validation scores of the weights after an update; None if they were not evaluated."""
        found = [scores for scores in self.evaluations(state) if scores["step"] == step]
        return found[-1] if found else None

    def from_best(self, state: TrainerState) -> list[Scores]:
        """Evaluations of a run, the best one first, and of equally good ones the earliest.

        Equal scores are compared by loss, and so are scores within `CHANCE` of the worst possible
        one.
        """
        metric = metric_of(self.arguments)
        sign, worst = (1, 0) if self.arguments.greater_is_better else (-1, -100)

        def rank(scores: Scores) -> tuple[float, float]:
            value = sign * scores[metric]
            return value if metric == "loss" else max(value, worst + CHANCE), -scores["loss"]

        # Sorting is stable, also backwards.
        return sorted(self.evaluations(state), key=rank, reverse=True)

    def since_best(self, state: TrainerState) -> int:
        """Number of evaluations after the best one; 0 if there is none at all.

        This decides which checkpoint is the best, and when a run without progress ends.
        """
        scores = self.evaluations(state)
        return len(scores) - 1 - scores.index(self.from_best(state)[0]) if scores else 0

    def best_saved(self, state: TrainerState) -> Path | None:
        """The checkpoint of the best evaluation that has one."""
        run = Path(self.arguments.output_dir)
        saved = closed_checkpoints(run)
        folders = (checkpoint_folder(run, each["step"]) for each in self.from_best(state))
        return next((folder for folder in folders if folder in saved), None)

    def is_better(self, new: Scores, old: Scores) -> bool:
        """Whether weights have a better score or a lower loss than others.

        The score alone would favour the best checkpoint, which was chosen, partly by luck, on the
        same pairs; the loss varies much less. Weights whose loss is NaN are never better.
        """
        gain = new[metric := metric_of(self.arguments)] - old[metric]
        is_greater: bool = (gain if self.arguments.greater_is_better else -gain) > 0
        return new["loss"] < float("inf") and (is_greater or new["loss"] < old["loss"])
