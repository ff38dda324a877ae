"""The end of a run: when its time is over, or a signal asks for it, and how the rate falls to 0."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.checkpoints import read_state

# Where a checkpoint keeps the seconds that its run has used, in its trainer_state.json.
_SECONDS = "seconds_of_schedule"
# Share of the minutes that is reserved for the last evaluation, until one has been measured.
_RESERVE = 0.03

_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedBySignalError(KeyboardInterrupt):
    """A signal ended training early; the model has been saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


class Schedule(TrainerCallback):
    """Ends training after the current update: at a deadline, after a signal, or with its minutes.

    With `minutes`, the learning rate is multiplied by the share of the time that is left. This
    adapts: if another program slows the run down, the rate falls more from one update to the next.
    Time for the last evaluations and the last checkpoint is reserved, as long as the latest ones
    took; an earlier one is left out if it would leave updates less time than it takes itself. A
    resumed run has the time that was left at its checkpoint. The clock of process 0 decides for
    all.

    Args:
        settings: Settings of the run: `minutes` and `max_minutes`.
        started: When the run began or was resumed, by `time.monotonic`.
        checkpoint: Folder from which the run is resumed; None for a new run.
        evaluations: Number of evaluations after the last update.

    Attributes:
        deadline: When the last update ends, by `time.monotonic`.
        interrupted: Whether a signal to stop arrived, in this process or in another one.
        signum: Number of the signal in this process; SIGTERM if another process received one.
        share_left: Factor of the learning rate, 1 to 0.
        can_evaluate: Whether another evaluation would leave time for updates before the last one.
    """

    def __init__(
        self,
        settings: TrainSettings,
        started: float = 0.0,
        checkpoint: Path | None = None,
        evaluations: int = 1,
    ) -> None:
        self.max_minutes, self.evaluations = settings.max_minutes, evaluations
        self.seconds = None if settings.minutes is None else 60 * settings.minutes
        # As if the run had never paused.
        self.started = started if self.seconds is None else started - _seconds_used(checkpoint)
        self.deadline = math.inf
        self.interrupted, self.signum = False, int(signal.SIGTERM)
        self.share_left, self.can_evaluate = 1.0, True
        # Seconds that the latest evaluation took, if there was one, and the latest checkpoint.
        self.evaluating = _RESERVE * (self.seconds or 0.0)
        self.has_evaluated, self.saving, self.saved_step = False, 0.0, 0
        self.now = time.monotonic()

    @property
    def minutes_left(self) -> float | None:
        """Minutes until the end, evaluation included; None: updates decide."""
        if self.seconds is None:
            return None
        return (self.started + self.seconds - time.monotonic()) / 60

    @property
    def is_over(self) -> bool:
        """Whether no time is left for an update."""
        return self.minutes_left is not None and 60 * self.minutes_left <= self._reserve()

    def _lap(self) -> float:
        """Seconds since the previous event; this one is now."""
        before, self.now = self.now, time.monotonic()
        return self.now - before

    def _reserve(self) -> float:
        """Seconds for the last evaluations, a checkpoint, and then the folder of the model."""
        return self.evaluations * self.evaluating + 2 * self.saving

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Starts the clock, and puts the time into a schedule that it may change.

        Raises:
            ValueError: If a new run has no time left for an update.
        """
        self._lap()
        if self.max_minutes is not None:
            self.deadline = self.now + 60 * self.max_minutes
        if lr_scheduler is None or self.seconds is None:
            return
        self.first_time, self.first_update = self.now, state.global_step
        self._set_share(args, state)
        lr_scheduler.lr_lambdas = [partial(self._rate, each) for each in lr_scheduler.lr_lambdas]
        if not self.share_left and not state.global_step:
            raise ValueError(
                f"The {self.seconds / 60:g} minutes of this run are over before its first update: "
                f"reading the pairs took {self.now - self.started:.0f} seconds, and "
                f"{self._reserve():.0f} are reserved for the last evaluation. Give more --minutes, "
                "or fewer pairs."
            )

    def _rate(self, schedule: Callable[[int], float], update: int) -> float:
        return schedule(update) * self.share_left

    def _set_share(self, args: TrainingArguments, state: TrainerState) -> None:
        """Sets the deadline and the share of the learning rate by the clock."""
        if self.seconds is None:
            return
        state.stateful_callbacks[_SECONDS] = {"used": self.now - self.started}
        reserve = min(self._reserve(), self.seconds)
        self.deadline = self.started + self.seconds - reserve
        share = max(0.0, self.deadline - self.now) / max(self.deadline - self.started, 1e-9)
        # Scores shortly before the last ones are not worth the updates that they cost.
        can_evaluate = self.now + 2 * self.evaluating * self.has_evaluated <= self.deadline
        if args.world_size > 1:
            clock = torch.tensor([share, can_evaluate], dtype=torch.float32, device=args.device)
            share, can_evaluate = broadcast(clock).tolist()
        self.share_left, self.can_evaluate = share, bool(can_evaluate)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the learning rate, and stops training in all processes at the same update.

        With `minutes`, the number of updates is estimated for the reports.
        """
        self._lap()
        self._set_share(args, state)
        if not self.can_evaluate:
            control.should_evaluate = control.should_save = False
        if self.seconds is not None:
            pace = (self.now - self.first_time) / (state.global_step - self.first_update)
            # Trainer would stop at this update, so it is never the next one.
            left = max(0.0, self.deadline - self.now)
            state.max_steps = state.global_step + 2 + int(left / max(pace, 1e-9))
        # If only one process stopped, the others would wait for it forever.
        interrupted, late = _in_any_process(args, self.interrupted, self.now > self.deadline)
        # A signal may arrive meanwhile.
        self.interrupted |= interrupted
        control.should_training_stop |= interrupted or late
        if control.should_training_stop and control.should_evaluate:
            # Trainer evaluates the last update too.
            control.should_evaluate = is_planned(args.eval_strategy, state.eval_steps, state)

    def is_interrupted(self, args: TrainingArguments) -> bool:
        """Whether a signal to stop arrived in any process; all of them call it together."""
        (interrupted,) = _in_any_process(args, self.interrupted)
        self.interrupted |= interrupted
        return interrupted

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *others: Any, **named: Any
    ) -> None:
        """Measures an evaluation."""
        self.evaluating, self.has_evaluated = self._lap(), True
        self._set_share(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, *others: Any, **named: Any
    ) -> None:
        """Measures a checkpoint, and remembers which one need not be saved again."""
        self.saved_step, self.saving = state.global_step, self._lap()
        self._set_share(args, state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves the state of a run that stops; an unplanned evaluation comes after training.

        So a resumed run knows as little of it as one that was not interrupted.
        """
        if control.should_training_stop:
            is_saved = self.saved_step == state.global_step
            control.should_save = args.save_strategy != "no" and not is_saved
            is_by_epoch = args.eval_strategy == IntervalStrategy.EPOCH
            control.should_evaluate &= is_by_epoch and is_planned(args.eval_strategy, 1, state)
        elif not self.can_evaluate:
            control.should_evaluate = control.should_save = False


def is_planned(strategy: str, steps: float, state: TrainerState) -> bool:
    """Whether a run that was not stopped would save, or evaluate, after this update."""
    if strategy == IntervalStrategy.STEPS:
        return state.global_step % steps == 0
    return strategy != IntervalStrategy.EPOCH or (state.epoch or 0) % 1 == 0


def _in_any_process(args: TrainingArguments, *flags: bool) -> list[bool]:
    """Whether each flag is set in this process or in another one; all of them call it together."""
    if args.world_size == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32, device=args.device)
    anywhere: list[bool] = reduce(votes, "sum").bool().tolist()
    return anywhere


@contextmanager
def interrupts_stop(schedule: Schedule) -> Iterator[None]:
    """The first Ctrl-C ends training after the current update, a second one immediately.

    So does SIGTERM, which batch systems send some time before SIGKILL.
    """

    def request(signum: int, frame: FrameType | None) -> None:
        if schedule.interrupted:
            raise StoppedBySignalError(signum)
        schedule.interrupted, schedule.signum = True, signum
        PartialState().print("\nStopping after this update. Repeat the signal to stop immediately.")

    previous = {number: signal.signal(number, request) for number in _STOPPING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _seconds_used(checkpoint: Path | None) -> float:
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
