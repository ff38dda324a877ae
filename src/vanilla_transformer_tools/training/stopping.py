"""The end of a run: when its time is over, or a signal asks for it, and how the rate falls to 0."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vanilla_transformer_tools.progress import duration
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.checkpoints import read_state

# Where a checkpoint keeps the seconds that its run has used, in its trainer_state.json.
_SECONDS = "seconds_of_schedule"
# Share of the minutes that is reserved for the last evaluation, until one has been measured.
_RESERVE = 0.03

_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedBySignalError(KeyboardInterrupt):
    """A signal ended training early; the model has been saved.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


@dataclass(frozen=True)
class Fall:
    """The learning rate falls to 0: during a whole run, or from where a signal found it.

    Attributes:
        began: When the fall began, by `time.monotonic`.
        seconds: Length of the fall.
        most_reserved: Largest share of it that is reserved for evaluations and checkpoints.
        height: Share of the learning rate that was left when it began.
        update: Number of updates when it began.
        last_update: Last update of the run; None: the time decides on it.
    """

    began: float
    seconds: float
    most_reserved: float = 1.0
    height: float = 1.0
    update: int = 0
    last_update: int | None = None

    def share(self, now: float, deadline: float, update: int) -> float:
        """Remaining share of the learning rate for the next update, 1 to 0."""
        for_updates = deadline - self.began
        share = max(0.0, deadline - now) / for_updates if for_updates > 0 else 0.0
        if self.last_update is not None:
            # The last update may come before the deadline.
            left = max(0, self.last_update - 1 - update)
            share = min(share, left / max(1, self.last_update - self.update))
        return self.height * share


class StopOnRequest(TrainerCallback):
    """Ends training after the current update: at a deadline, after a signal, or with its minutes.

    With `minutes`, the learning rate is multiplied by the share of the time that is left. This
    adapts: if another program slows the run down, the rate falls more from one update to the next.
    Time for the last evaluations and the last checkpoint is reserved, as long as the latest ones
    took; an earlier one is left out if it would leave updates less time than it takes itself. A
    resumed run has the time that was left at its checkpoint.

    With `finish_within`, a first signal only makes the rate fall from where it is to 0, in any
    schedule that is a function of the update. A resumed run has the schedule that it had before
    the signal. The clock of process 0 decides for all.

    Args:
        settings: Settings of the run: `minutes`, `max_minutes` and `finish_within`.
        started: When the run began or was resumed, by `time.monotonic`.
        checkpoint: Folder from which the run is resumed; None for a new run.
        evaluations: Number of evaluations after the last update.

    Attributes:
        deadline: When the last update ends, by `time.monotonic`.
        asked: Whether a signal to finish arrived, in this process or in another one.
        finishing: The same, as all processes know it since the latest update.
        interrupted: Whether a signal to stop arrived, in this process or in another one.
        signum: Number of the signal in this process; SIGTERM if another process received one.
        share_left: Factor of the learning rate, 1 to 0.
        can_evaluate: Whether another evaluation would leave time for updates before the last one.
        decay: The fall of the rate after a signal; None before it.
    """

    def __init__(
        self,
        settings: TrainSettings,
        started: float = 0.0,
        checkpoint: Path | None = None,
        evaluations: int = 1,
    ) -> None:
        self.max_minutes, self.finish_within = settings.max_minutes, settings.finish_within
        minutes = settings.minutes
        # As if the run had never paused.
        self.started = started if minutes is None else started - _seconds_used(checkpoint)
        self.planned = None if minutes is None else Fall(self.started, 60 * minutes)
        self.decay: Fall | None = None
        self.deadline = math.inf
        self.asked = self.finishing = self.interrupted = False
        self.signum: int = signal.SIGTERM
        self.evaluates = True
        self.scored_step = self.saved_step = 0
        self.share_left, self.can_evaluate = 1.0, True
        self.evaluations = evaluations
        # Seconds that the latest evaluation and checkpoint took, and the time of the latest event.
        self.evaluating: float | None = None
        self.saving = 0.0
        self.now = time.monotonic()

    @property
    def minutes_left(self) -> float | None:
        """Minutes until the end, evaluation included; None: updates decide."""
        if self.planned is None:
            return None
        return (self.started + self.planned.seconds - time.monotonic()) / 60

    def _lap(self) -> float:
        """Seconds since the previous event; this one is now."""
        before, self.now = self.now, time.monotonic()
        return self.now - before

    def _reserve(self, seconds: float) -> float:
        """Seconds for the last evaluations, a checkpoint, and then the folder of the model."""
        evaluating = _RESERVE * seconds if self.evaluating is None else self.evaluating
        return self.evaluations * evaluating + 2 * self.saving

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
        if lr_scheduler is None or (self.planned is None and self.finish_within is None):
            return
        self.first_time, self.first_update = self.now, state.global_step
        self._set_share(args, state)
        lr_scheduler.lr_lambdas = [
            partial(self._rate, schedule) for schedule in lr_scheduler.lr_lambdas
        ]
        if self.planned is None or self.share_left:
            return
        if not state.global_step:
            seconds = self.planned.seconds
            raise ValueError(
                f"The {seconds / 60:g} minutes of this run are over before its first update: "
                f"reading the pairs and trying batches took {self.first_time - self.started:.0f} "
                f"seconds, and {self._reserve(seconds):.0f} are reserved for the last "
                "evaluation. Give more --minutes, or fewer pairs."
            )
        # `_run_epoch` makes no update in a run that has no time left.
        state.max_steps = state.global_step

    def _rate(self, schedule: Callable[[int], float], update: int) -> float:
        # After the signal the rate only falls, also if it was warming up.
        return schedule(self.decay.update if self.decay else update) * self.share_left

    def _set_share(self, args: TrainingArguments, state: TrainerState) -> None:
        """Sets the deadline and the share of the learning rate by the clock."""
        if self.planned is not None:
            state.stateful_callbacks[_SECONDS] = {"used": self.now - self.started}
        schedule = self.decay or self.planned
        if schedule is None:
            return
        reserve = min(self._reserve(schedule.seconds), schedule.most_reserved * schedule.seconds)
        deadline = schedule.began + schedule.seconds - reserve
        # A signal never puts an end off that was planned earlier.
        self.deadline = min(deadline, self.deadline) if self.decay else deadline
        share = schedule.share(self.now, self.deadline, state.global_step)
        # Scores shortly before the last ones are not worth the updates that they cost.
        can_evaluate = self.now + 2 * (self.evaluating or 0.0) <= self.deadline
        if args.world_size > 1:
            clock = torch.tensor([share, can_evaluate], dtype=torch.float32, device=args.device)
            share, can_evaluate = broadcast(clock).tolist()
        self.share_left, self.can_evaluate = share, bool(can_evaluate)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Sets the learning rate, and stops training in all processes at the same update.

        After a signal the rate begins to fall. With `minutes`, the number of updates is estimated
        for the reports.
        """
        self._lap()
        begins_decay = self.finishing and self.decay is None
        if begins_decay:
            self.decay = Fall(
                self.now,
                60 * (self.finish_within or 0.0),
                most_reserved=0.5,
                height=self.share_left,
                update=state.global_step,
                last_update=None if self.planned else state.max_steps,
            )
        self._set_share(args, state)
        left = max(0.0, self.deadline - self.now)
        if begins_decay:
            PartialState().print(
                f"finishing   the learning rate falls from {lr_scheduler.get_last_lr()[0]:.2e} to "
                f"0 in {duration(left)}, then the run is evaluated and saved"
            )
        if not self.can_evaluate:
            control.should_evaluate = control.should_save = False
        if self.planned is not None:
            pace = (self.now - self.first_time) / (state.global_step - self.first_update)
            # Trainer would stop at this update, so it is never the next one.
            state.max_steps = state.global_step + 2 + int(left / max(pace, 1e-9))
        late = time.monotonic() > self.deadline
        # If only one process stopped, the others would wait for it forever.
        interrupted, late, finishing = _in_any_process(args, self.interrupted, late, self.asked)
        # A signal may arrive meanwhile.
        self.interrupted |= interrupted
        self.asked |= finishing
        self.finishing = finishing
        if interrupted or late:
            self.evaluates = not interrupted
            control.should_training_stop = True

    def is_interrupted(self, args: TrainingArguments) -> bool:
        """Whether a signal to stop arrived in any process; all of them call it together."""
        (interrupted,) = _in_any_process(args, self.interrupted)
        self.interrupted |= interrupted
        return interrupted

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *others: Any, **named: Any
    ) -> None:
        """Measures an evaluation, and remembers whose weights need not be evaluated again."""
        self.scored_step, self.evaluating = state.global_step, self._lap()
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
        """Saves the state of an early stop, and evaluates it unless a signal asked for the stop.

        The evaluation of another epoch is left out if there is no time for it.
        """
        if control.should_training_stop:
            is_saved = self.saved_step == state.global_step
            control.should_save = args.save_strategy != "no" and not is_saved
            is_scored = self.scored_step == state.global_step
            control.should_evaluate = (
                args.eval_strategy != "no" and self.evaluates and not is_scored
            )
        elif not self.can_evaluate:
            control.should_evaluate = control.should_save = False


def _in_any_process(args: TrainingArguments, *flags: bool) -> list[bool]:
    """Whether each flag is set in this process or in another one; all of them call it together."""
    if args.world_size == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32, device=args.device)
    anywhere: list[bool] = reduce(votes, "sum").bool().tolist()
    return anywhere


@contextmanager
def interrupts_stop(stop: StopOnRequest) -> Iterator[None]:
    """The first Ctrl-C ends training after the current update, a second one immediately.

    If the run can finish within some minutes, one before these asks for that. So does SIGTERM,
    which batch systems send some time before SIGKILL.
    """

    def request(signum: int, frame: FrameType | None) -> None:
        if stop.interrupted:
            raise StoppedBySignalError(signum)
        if stop.finish_within is not None and not stop.asked:
            stop.asked = True
            PartialState().print(
                f"\nFinishing within {stop.finish_within:g} minutes. Repeat the signal to stop "
                "after an update."
            )
            return
        stop.interrupted, stop.signum = True, signum
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
