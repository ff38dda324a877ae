"""What a run does between its updates: it seeds epochs, and stops in time or when told to."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vanilla_transformer.batches import TokenBatchSampler


class SeedEpochs(TrainerCallback):
    """Tells the sampler which epoch begins; accelerate only tells samplers that it has wrapped.

    Args:
        sampler: To be told.
    """

    def __init__(self, sampler: TokenBatchSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sets the epoch, also in the middle of one that is resumed."""
        self.sampler.set_epoch(int(state.epoch or 0))


class StopOnRequest(TrainerCallback):
    """Ends training after the update at hand: at a deadline, or when it is told to.

    Args:
        max_minutes: Until the deadline; None for none.
    """

    def __init__(self, max_minutes: float | None) -> None:
        self.max_minutes = max_minutes
        self.deadline = float("inf")
        self.interrupted = False
        self.evaluates = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        if self.max_minutes is not None:
            self.deadline = time.monotonic() + 60 * self.max_minutes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops the loop where it is time, for all processes at the same update."""
        interrupted, late = self.interrupted, time.monotonic() > self.deadline
        if args.world_size > 1:
            # A signal may reach one process only; the others would then wait for it for ever.
            votes = torch.tensor([interrupted, late], dtype=torch.int32, device=args.device)
            interrupted, late = reduce(votes, "sum").bool().tolist()
        if interrupted or late:
            self.evaluates = not interrupted
            control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keeps what an early stop has reached, and scores it unless somebody waits for Ctrl-C."""
        if control.should_training_stop:
            control.should_save = args.save_strategy != "no"
            control.should_evaluate = args.eval_strategy != "no" and self.evaluates


@contextmanager
def interrupts_stop(stop: StopOnRequest) -> Iterator[None]:
    """The first Ctrl-C ends training after the update at hand, a second one at once."""

    def request(signum: int, frame: FrameType | None) -> None:
        if stop.interrupted:
            raise KeyboardInterrupt
        stop.interrupted = True
        PartialState().print("\nStopping after this update; once more to stop at once.")

    previous = signal.signal(signal.SIGINT, request)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
