"""Steps between updates: weights are averaged, and runs stopped early."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from vanilla_transformer_tools.training.checkpoints import checkpoint_folder
from vanilla_transformer_tools.training.processes import divided_like, gathered

# A file of each checkpoint.
MOVING_AVERAGE_FILE = "moving_average.safetensors"

_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


class DivergedError(ArithmeticError):
    """A loss, a weight or a validation loss is not finite: training would never recover."""


class StoppedBySignalError(KeyboardInterrupt):
    """A signal ended training early; the model has been saved.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


def _in_any_process(args: TrainingArguments, *flags: bool) -> list[bool]:
    """Whether each flag is set in this process or in another one; all of them call it together."""
    if args.world_size == 1:
        return list(flags)
    votes = torch.tensor(flags, dtype=torch.int32, device=args.device)
    anywhere: list[bool] = reduce(votes, "sum").bool().tolist()
    return anywhere


class StopOnRequest(TrainerCallback):
    """Ends training after the current update: at a deadline, or after a signal.

    With `finish_within`, a first signal only asks for it: `TimeSchedule` then sets the deadline.

    Attributes:
        asked: Whether such a signal arrived, in this process or in another one.
        finishing: The same, as all processes know it since the latest update.
        interrupted: Whether a signal to stop arrived, in this process or in another one.
        signum: Number of the signal in this process; SIGTERM if another process received one.

    Args:
        max_minutes: Minutes until the deadline; None: there is none.
        finish_within: Minutes from the first signal to the end; None: that signal stops the run.
    """

    def __init__(self, max_minutes: float | None, finish_within: float | None = None) -> None:
        self.max_minutes = max_minutes
        self.finish_within = finish_within
        self.deadline = float("inf")
        self.asked = self.finishing = False
        self.interrupted = False
        self.signum: int = signal.SIGTERM
        self.evaluates = True
        self.scored_step = self.saved_step = 0

    def on_train_begin(self, _: Any, state: TrainerState, *others: Any, **named: Any) -> None:
        """Starts the clock."""
        if self.max_minutes is not None:
            self.deadline = time.monotonic() + 60 * self.max_minutes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops training in all processes at the same update."""
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

    def on_evaluate(self, _: Any, state: TrainerState, *others: Any, **named: Any) -> None:
        """Remembers the update, so that its weights are not evaluated twice."""
        self.scored_step = state.global_step

    def on_save(self, _: Any, state: TrainerState, *others: Any, **named: Any) -> None:
        """Remembers the update, so that its checkpoint is not saved twice."""
        self.saved_step = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves the state of an early stop, and evaluates it unless a signal asked for the stop."""
        if control.should_training_stop:
            is_saved = self.saved_step == state.global_step
            control.should_save = args.save_strategy != "no" and not is_saved
            is_scored = self.scored_step == state.global_step
            control.should_evaluate = (
                args.eval_strategy != "no" and self.evaluates and not is_scored
            )


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
