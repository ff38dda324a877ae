"""The progress of a run: one bar on a terminal, one line a report in a file or a pipe."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from vanilla_transformer_tools.evaluation.metrics import METRICS
from vanilla_transformer_tools.progress import bar_on_terminal, duration
from vanilla_transformer_tools.text.training_data import TrainingData
from vanilla_transformer_tools.training.averaging import metric_of
from vanilla_transformer_tools.training.callbacks import StopOnRequest
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer


@contextmanager
def progress_shown(trainer: TokenBatchTrainer, stop: StopOnRequest) -> Iterator[None]:
    """Shows the progress of a trainer, without Trainer's own bars and dictionaries."""
    for callback in (PrinterCallback, DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(callback)
    with ExitStack() as stack:
        trainer.add_callback(Progress(trainer.data, stop, stack, list(trainer.further_sets)))
        yield


class Progress(TrainerCallback):
    """Prints validation scores, and the other reports too if there is no terminal for a bar.

    Tokens per second are those of source and target without padding, as many in each update as on
    average. The time that evaluating and saving take counts for the time left only.

    Args:
        data: What is trained on.
        stop: Callback whose deadline may come before the last update.
        stack: Closes the bar.
        sets: Names of further validation sets.
    """

    def __init__(
        self,
        data: TrainingData,
        stop: StopOnRequest,
        stack: ExitStack,
        sets: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.stop = stop
        self.stack = stack
        self.sets = sets
        self.bar: tqdm | None = None
        self.loss = self.score = self.speed = ""
        self.evaluated_batches = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clocks, and opens the bar if output and errors go to a terminal."""
        self.first = state.global_step
        self.started = time.monotonic()
        self._restart_clock(state)
        on_terminal = sys.stdout.isatty() and sys.stderr.isatty() and not args.disable_tqdm
        if on_terminal and state.is_world_process_zero:
            bar = bar_on_terminal("train", state.max_steps, "{postfix}", self.first)
            self.bar = self.stack.enter_context(bar)

    def _restart_clock(self, state: TrainerState) -> None:
        """Begins to measure the speed anew, after this update."""
        self.since, self.counted = time.monotonic(), state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advances the bar."""
        self._update_bar(state)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader[Any],
        **kwargs: Any,
    ) -> None:
        """Counts the batches of an evaluation in front of the bar."""
        self.evaluated_batches += 1
        if self.bar is not None:
            count = f"{self.evaluated_batches:,}/{len(eval_dataloader):,}"
            self.bar.set_description_str(f"validate {count}")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Prints the scores of an update; those of averaged weights are printed elsewhere."""
        self.evaluated_batches = 0
        if self.bar is not None:
            self.bar.set_description_str("train", refresh=False)
        if "eval_loss" in metrics:
            shown = {"loss": f"validation loss {metrics['eval_loss']:.3f}"}
            for prefix in ("", *(f"{name}_" for name in self.sets)):
                if prefix:
                    loss = f"{prefix}loss"
                    shown[loss] = f"{loss.replace('_', ' ')} {metrics[f'eval_{loss}']:.3f}"
                for name in METRICS:
                    if (value := metrics.get(f"eval_{prefix}{name}")) is not None:
                        shown[f"{prefix}{name}"] = f"{name} {value:.2f}"
            self.score = shown.get(metric_of(args), "")
            self._say(args, *self._place(state), *shown.values())
        self._update_bar(state)
        self._restart_clock(state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the time of saving out of the speed."""
        self._restart_clock(state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Prints a report, or keeps it for the bar."""
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"
            self.speed = self._measure_speed(args, state)
            if self.bar is None:
                rate = logs.get("learning_rate")
                report = [self.loss, "" if rate is None else f"learning rate {rate:.2e}"]
                left = self._time_left(state)
                self._say(args, *self._place(state), *report, self.speed, left)
            self._update_bar(state)
        elif "train_runtime" in logs:
            updates = state.global_step - self.first
            self._say(args, f"trained     {updates:,} updates in {duration(logs['train_runtime'])}")

    def _update_bar(self, state: TrainerState) -> None:
        if self.bar is not None:
            parts = [self._time_left(state), self.loss, self.score, self.speed]
            self.bar.set_postfix_str(", ".join(filter(None, parts)), refresh=False)
            # A schedule of time only estimates it.
            self.bar.total = state.max_steps
            self.bar.update(state.global_step - self.bar.n)

    def _place(self, state: TrainerState) -> Iterator[str]:
        """Step and epoch; a stream has no epochs."""
        width = len(f"{state.max_steps:,}")
        yield f"step {state.global_step:>{width},}/{state.max_steps:,}"
        if self.data.period.is_corpus:
            yield f"epoch {state.epoch or 0:.2f}"

    def _measure_speed(self, args: TrainingArguments, state: TrainerState) -> str:
        """Tokens per second since the last report, evaluation or checkpoint."""
        updates, seconds = state.global_step - self.counted, time.monotonic() - self.since
        if not updates:
            return self.speed
        self._restart_clock(state)
        tokens = self.data.tokens / self.data.batches * args.gradient_accumulation_steps
        return f"{updates * tokens / seconds:,.0f} tokens/s"

    def _time_left(self, state: TrainerState) -> str:
        """Time to the last update or to the deadline, at the mean speed of this run so far."""
        if state.global_step == self.first:
            return ""
        now = time.monotonic()
        per_update = (now - self.started) / (state.global_step - self.first)
        seconds = per_update * (state.max_steps - state.global_step)
        return f"{duration(max(0, min(seconds, self.stop.deadline - now)))} left"

    def _say(self, args: TrainingArguments, *parts: str) -> None:
        if args.should_log:
            print("  ".join(filter(None, parts)), flush=True)
