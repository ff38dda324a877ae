"""A schedule of time: the learning rate falls with the minutes of a run and ends with them at 0."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from vanilla_transformer.training.callbacks import StopOnRequest

# Where a checkpoint keeps the seconds that its run has used, in its trainer_state.json.
_SECONDS = "seconds_of_schedule"
# Share of the minutes that is reserved for the last evaluation, until one has been measured.
_RESERVE = 0.03


class TimeSchedule(TrainerCallback):
    """Multiplies the learning rate by the share of the time that is left, and ends the run.

    The schedule bends by itself: if another program slows the run down, the rate falls more from
    one update to the next. Time for the last evaluation and checkpoint is reserved, as long as the
    latest ones took; an earlier one that would end in this time is left out. A resumed run has the
    time that was left at its checkpoint.

    The clock of process 0 decides for all.

    Args:
        minutes: Length of the run, over all its legs.
        started: When this leg began, by `time.monotonic`.
        stop: Ends the run; its deadline is set.
        checkpoint: Folder from which the run is resumed; None for a new run.

    Attributes:
        share_left: By which the learning rate is multiplied, 1 to 0.
        can_evaluate: Whether there is time for another evaluation before the last one.
    """

    def __init__(
        self, minutes: float, started: float, stop: StopOnRequest, checkpoint: str | None
    ) -> None:
        self.seconds = 60 * minutes
        # As if there had been one leg without a pause.
        self.started = started - _seconds_used(checkpoint)
        self.stop = stop
        self.share_left, self.can_evaluate = 1.0, True
        self.evaluating: float | None = None
        self.saving = 0.0

    @property
    def minutes_left(self) -> float:
        """Minutes until the end, evaluation included."""
        return (self.started + self.seconds - time.monotonic()) / 60

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LambdaLR,
        **kwargs: Any,
    ) -> None:
        """Puts the time into the schedule, which otherwise only warms up."""
        self.began, self.first = time.monotonic(), state.global_step
        self._count(args, state)
        lr_scheduler.lr_lambdas = [
            partial(self._rate, warm_up) for warm_up in lr_scheduler.lr_lambdas
        ]
        # `_run_epoch` makes no update in a run that has no time left.
        if state.global_step and not self.share_left:
            state.max_steps = state.global_step

    def _rate(self, warm_up: Callable[[int], float], update: int) -> float:
        return warm_up(update) * self.share_left

    def _count(self, args: TrainingArguments, state: TrainerState) -> None:
        """Looks at the clock."""
        self.mark = time.monotonic()
        used = self.mark - self.started
        state.stateful_callbacks[_SECONDS] = {"used": used}
        reserve = _RESERVE * self.seconds if self.evaluating is None else self.evaluating
        # A checkpoint, and then the folder of the model.
        for_updates = self.seconds - reserve - 2 * self.saving
        self.stop.deadline = self.started + for_updates
        share = 0.0 if for_updates <= 0 else max(0.0, 1 - used / for_updates)
        can_evaluate = used + (self.evaluating or 0.0) <= for_updates
        if args.world_size > 1:
            clock = torch.tensor([share, can_evaluate], dtype=torch.float32, device=args.device)
            share, can_evaluate = broadcast(clock).tolist()
        self.share_left, self.can_evaluate = share, bool(can_evaluate)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks at the clock, and estimates the number of updates for the reports."""
        self._count(args, state)
        pace = (self.mark - self.began) / (state.global_step - self.first)
        left = max(0.0, self.stop.deadline - self.mark)
        # Trainer would stop at this update, so it is never the next one.
        state.max_steps = state.global_step + 2 + int(left / max(pace, 1e-9))
        if not self.can_evaluate:
            control.should_evaluate = control.should_save = False

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures an evaluation."""
        self.evaluating = time.monotonic() - self.mark
        self._count(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures a checkpoint."""
        self.saving = time.monotonic() - self.mark
        self._count(args, state)


def _seconds_used(checkpoint: str | None) -> float:
    """Seconds that a run had used when it saved a checkpoint."""
    if checkpoint is None:
        return 0.0
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    return float(state.stateful_callbacks[_SECONDS]["used"])
