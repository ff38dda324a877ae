"""Schedules of time: the learning rate falls with the minutes of a run and ends with them at 0."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vanilla_transformer_tools.progress import duration
from vanilla_transformer_tools.training.callbacks import StopOnRequest
from vanilla_transformer_tools.training.checkpoints import read_state

# Where a checkpoint keeps the seconds that its run has used, in its trainer_state.json.
_SECONDS = "seconds_of_schedule"
# Share of the minutes that is reserved for the last evaluation, until one has been measured.
_RESERVE = 0.03


class TimeSchedule(TrainerCallback):
    """Multiplies the learning rate by the share of the time that is left, and ends the run.

    The schedule bends by itself: if another program slows the run down, the rate falls more from
    one update to the next. Time for the last evaluations and the last checkpoint is reserved, as
    long as the latest ones took; an earlier one that would end in this time is left out. A resumed
    run has the time that was left at its checkpoint.

    When a signal has asked the run to finish, the rate falls from where it is to 0 within
    `stop.finish_within` minutes, in any schedule that is a function of the update. Half of these at
    most are reserved. A resumed run has the schedule that it had before the signal.

    The clock of process 0 decides for all.

    Args:
        minutes: Length of the run, over all its legs; None: another schedule and length hold until
            a signal comes.
        started: When this leg began, by `time.monotonic`.
        stop: Ends the run; its deadline is set.
        checkpoint: Folder from which the run is resumed; None for a new run.
        evaluations: Their number after the last update.

    Attributes:
        share_left: By which the learning rate is multiplied, 1 to 0.
        can_evaluate: Whether there is time for another evaluation before the last one.
    """

    def __init__(
        self,
        minutes: float | None,
        started: float,
        stop: StopOnRequest,
        checkpoint: str | None,
        evaluations: int,
    ) -> None:
        self.seconds = math.inf
        if minutes is not None:
            self.seconds = 60 * minutes
            # As if there had been one leg without a pause.
            started -= _seconds_used(checkpoint)
        self.started = started
        self.stop = stop
        self.evaluations = evaluations
        self.share_left, self.can_evaluate = 1.0, True
        self.evaluating: float | None = None
        self.saving = 0.0
        # When the rate began to fall, from which share, and the update of the signal.
        self.fell, self.height = started, 1.0
        self.bent_at: int | None = None

    @property
    def minutes_left(self) -> float | None:
        """Minutes until the end, evaluation included; None: updates decide."""
        if math.isinf(self.seconds):
            return None
        return (self.started + self.seconds - time.monotonic()) / 60

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LambdaLR,
        **kwargs: Any,
    ) -> None:
        """Puts the time into the schedule, which with `minutes` otherwise only warms up.

        Raises:
            ValueError: If a new run has no time left for an update.
        """
        self.began, self.first = time.monotonic(), state.global_step
        self._count(args, state)
        lr_scheduler.lr_lambdas = [
            partial(self._rate, schedule) for schedule in lr_scheduler.lr_lambdas
        ]
        if self.share_left:
            return
        if not state.global_step:
            raise ValueError(
                f"The {self.seconds / 60:g} minutes of this run are over before its first update: "
                f"reading the pairs and trying batches took {self.mark - self.started:.0f} "
                f"seconds, and {self._reserve(self.seconds):.0f} are reserved for the last "
                "evaluation. Give more --minutes, or fewer pairs."
            )
        # `_run_epoch` makes no update in a run that has no time left.
        state.max_steps = state.global_step

    def _rate(self, schedule: Callable[[int], float], update: int) -> float:
        # After the signal the rate only falls, also if it was warming up.
        return schedule(update if self.bent_at is None else self.bent_at) * self.share_left

    def _reserve(self, seconds: float) -> float:
        """Seconds for the last evaluations, a checkpoint, and then the folder of the model."""
        evaluating = _RESERVE * seconds if self.evaluating is None else self.evaluating
        return self.evaluations * evaluating + 2 * self.saving

    def _count(self, args: TrainingArguments, state: TrainerState) -> None:
        """Looks at the clock."""
        self.mark = time.monotonic()
        state.stateful_callbacks[_SECONDS] = {"used": self.mark - self.started}
        if self.bent_at is None:
            if math.isinf(self.seconds):
                return
            self.stop.deadline = self.started + self.seconds - self._reserve(self.seconds)
        else:
            self._hurry()
        for_updates = self.stop.deadline - self.fell
        left = max(0.0, self.stop.deadline - self.mark)
        share = left / for_updates if for_updates > 0 else 0.0
        if self.bent_at is not None and math.isinf(self.seconds):
            # The last update may come first. This sets the rate of the next one.
            updates = state.max_steps - 1 - state.global_step
            share = min(share, max(0, updates) / max(1, state.max_steps - self.bent_at))
        can_evaluate = self.mark + (self.evaluating or 0.0) <= self.stop.deadline
        if args.world_size > 1:
            clock = torch.tensor([share, can_evaluate], dtype=torch.float32, device=args.device)
            share, can_evaluate = broadcast(clock).tolist()
        self.share_left, self.can_evaluate = self.height * share, bool(can_evaluate)

    def _bend(self, state: TrainerState, rate: float) -> None:
        """Begins the fall that a signal has asked for."""
        self.fell, self.height, self.bent_at = time.monotonic(), self.share_left, state.global_step
        self._hurry()
        left = duration(max(0.0, self.stop.deadline - self.fell))
        PartialState().print(
            f"finishing   the learning rate falls from {rate:.2e} to 0 in {left}, then the run is "
            "evaluated and saved"
        )

    def _hurry(self) -> None:
        """Sets the end that a signal has asked for, unless an earlier one is planned."""
        seconds = 60 * (self.stop.finish_within or 0.0)
        end = self.fell + seconds - min(self._reserve(seconds), seconds / 2)
        self.stop.deadline = min(self.stop.deadline, end)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LambdaLR,
        **kwargs: Any,
    ) -> None:
        """Looks at the clock, and estimates the number of updates for the reports."""
        if self.stop.finishing and self.bent_at is None:
            self._bend(state, float(lr_scheduler.get_last_lr()[0]))
        self._count(args, state)
        if not self.can_evaluate:
            control.should_evaluate = control.should_save = False
        if math.isinf(self.seconds):
            return
        pace = (self.mark - self.began) / (state.global_step - self.first)
        left = max(0.0, self.stop.deadline - self.mark)
        # Trainer would stop at this update, so it is never the next one.
        state.max_steps = state.global_step + 2 + int(left / max(pace, 1e-9))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves out the evaluation of an epoch likewise; `StopOnRequest` asks for the last one."""
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
    callbacks = read_state(checkpoint).stateful_callbacks
    if _SECONDS not in callbacks:
        raise ValueError(
            f"--minutes continues runs that began with it, got {checkpoint} of another one. Leave "
            "it out, or train in another folder."
        )
    return float(callbacks[_SECONDS]["used"])
