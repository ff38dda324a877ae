"""Output of a run: a summary of data and model, then progress and a log.

Progress is one bar on a terminal, and one line a report in a file or a pipe.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import TrainerCallback, TrainerState, TrainingArguments

from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.progress import bar_on_terminal
from vanilla_transformer_tools.settings import METRICS, VALIDATION
from vanilla_transformer_tools.text.training_data import TrainingData
from vanilla_transformer_tools.text.units import most_frequent, unknown_strings
from vanilla_transformer_tools.training.machine import dtype_of_products, hardware
from vanilla_transformer_tools.training.ranking import metric_of
from vanilla_transformer_tools.training.schedule import Schedule
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

_NOT_FINITE = ("nan", "inf", "-inf")
# Names of the types of products.
_PRODUCTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float32"}


def summary(trainer: TokenBatchTrainer, minutes_left: float | None = None) -> Iterator[str]:
    """Describes a run before its first update; without minutes, a number of updates ends it."""
    arguments, model, data = trainer.args, trainer.model, trainer.data
    tokenizers = trainer.tokenizers
    vocabulary = f"vocabulary {model.config.vocab_size:,}"
    if not tokenizers.is_joint:
        sizes = f"{model.config.vocab_size:,} and {model.config.target_vocab_size:,}"
        vocabulary = f"vocabularies {sizes}"
    yield f"device      {hardware(arguments.device)}, {_PRODUCTS[dtype_of_products(arguments)]}"
    yield f"pairs       {data.describe_pairs()}"
    sides = ("source", tokenizers.source, "text"), ("target", tokenizers.target, "text_target")
    for side, tokenizer, argument in sides if trainer.eval_dataset else ():
        # None, if the vocabulary has pieces of words.
        if unknown := unknown_strings(tokenizer, trainer.eval_dataset[side], argument):
            yield (
                f"unknown     {unknown.total():,} tokens of the validation {side}s: "
                f"{most_frequent(unknown)}"
            )
    trained = model.num_parameters(only_trainable=True)
    of_which = f", of which {trained:,} are trained" * (trained < model.num_parameters())
    yield f"parameters  {model.num_parameters():,}{of_which}, {vocabulary}"
    yield f"batches     {data.describe_batches()}"
    if minutes_left is not None:
        end = time.strftime("%A, %H:%M", time.localtime(time.time() + 60 * minutes_left))
        yield f"time        the run ends on {end} (evaluation counted)"
        return
    updates = arguments.max_steps
    if updates <= 0:
        updates = arguments.num_train_epochs * data.batches / arguments.gradient_accumulation_steps
    warmup = arguments.get_warmup_steps(round(updates))
    if 2 * warmup > round(updates):
        yield (
            f"warm-up     {warmup:,} updates, of {updates:,.0f} in all: train longer, or shorten "
            "it with --warmup_steps"
        )


class Progress(TrainerCallback):
    """Prints validation scores, and the other reports too if there is no terminal for a bar.

    Tokens per second count source and target without padding, as many in each update as on
    average. The time that evaluating and saving take counts for the time left only.

    Args:
        data: Training data.
        stop: Its deadline may come before the last update.
        stack: Closes the bar.
    """

    def __init__(self, data: TrainingData, stop: Schedule, stack: ExitStack) -> None:
        self.data = data
        self.stop = stop
        self.stack = stack
        self.bar: tqdm | None = None
        self.loss = self.score = self.speed = ""
        self.evaluated_batches = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any
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
        """Restarts the measurement of the speed, after this update."""
        self.since, self.counted = time.monotonic(), state.global_step

    def on_step_end(self, _: Any, state: TrainerState, *others: Any, **named: Any) -> None:
        """Advances the bar."""
        self._update_bar(state)

    def on_prediction_step(
        self, _: Any, state: TrainerState, *others: Any, eval_dataloader: DataLoader[Any], **kw: Any
    ) -> None:
        """Counts the batches of an evaluation in front of the bar."""
        self.evaluated_batches += 1
        if self.bar is not None:
            count = f"{self.evaluated_batches:,}/{len(eval_dataloader):,}"
            self.bar.set_description_str(f"validate {count}")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, *_: Any, metrics: Any, **kwargs: Any
    ) -> None:
        """Prints the scores of an update; scores of averaged weights are printed elsewhere."""
        self.evaluated_batches = 0
        if self.bar is not None:
            self.bar.set_description_str("train", refresh=False)
        if "eval_loss" in metrics:
            shown = {"loss": f"{VALIDATION} loss {metrics['eval_loss']:.3f}"}
            for name in METRICS:
                if (value := metrics.get(f"eval_{name}")) is not None:
                    shown[name] = f"{name} {value:.2f}"
            self.score = shown.get(metric_of(args), "")
            self._say(args, *self._place(state), *shown.values())
        self._update_bar(state)
        self._restart_clock(state)

    def on_save(self, _: Any, state: TrainerState, *others: Any, **named: Any) -> None:
        """Leaves the time of saving out of the speed."""
        self._restart_clock(state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: Any, logs: dict[str, Any], **kw: Any
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
            updates = f"{state.global_step - self.first:,} updates"
            duration = tqdm.format_interval(logs["train_runtime"])
            self._say(args, f"trained     {updates} in {duration}")

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
        # With a time in place of a number of updates, that is an estimate.
        about = "" if self.stop.seconds is None else "~"
        yield f"step {state.global_step:>{width},}/{about}{state.max_steps:,}"
        if self.data.is_corpus:
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
        left = max(0, min(seconds, self.stop.deadline - now))
        return f"{tqdm.format_interval(left)} left"

    def _say(self, args: TrainingArguments, *parts: str) -> None:
        if args.should_log:
            print("  ".join(filter(None, parts)), flush=True)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The reports that `JsonLinesLog` wrote; an empty list if there is no file.

    Raises:
        ValueError: If a line is no report. The last line may be one that a kill has cut.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    *lines, _ = text.split("\n")
    reports = []
    for number, line in enumerate(lines, start=1):
        try:
            report = json.loads(line).items()
            reports.append(
                {name: float(value) if value in _NOT_FINITE else value for name, value in report}
            )
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"Line {number} of {path} must be a JSON object, got {line[:60]!r}. Take it out."
            ) from error
    return reports


def _line(report: dict[str, Any]) -> str:
    """A report in JSON, which has no numbers that are not finite: those are strings."""
    values = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in report.items()
    }
    return json.dumps(values)


class JsonLinesLog(TrainerCallback):
    """Appends every report of Trainer to a file, one JSON object a line.

    Args:
        path: File of the log.
        first_update: Update of the checkpoint that a run is resumed from. Later reports are
            removed, because they will be written again, but their minutes count. 0: an existing
            file is replaced; its run ended before its first checkpoint.
    """

    def __init__(self, path: Path, first_update: int) -> None:
        self.path, self.first_update = path, first_update
        reports = read_log(path) if first_update else []
        self.started = time.monotonic() - sum(60 * report["minutes"] for report in reports[-1:])
        if PartialState().is_main_process:
            kept = [report for report in reports if report["step"] <= first_update]
            if kept:
                write_lines(path, map(_line, kept))
            else:
                path.unlink(missing_ok=True)

    @property
    def minutes(self) -> float:
        """Minutes of training, those before it was resumed included."""
        return (time.monotonic() - self.started) / 60

    def on_log(
        self, _: Any, state: TrainerState, *others: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Writes one report."""
        if state.global_step == self.first_update:
            # There was no update, so the mean loss is of nothing.
            logs = {name: value for name, value in logs.items() if name != "train_loss"}
        if not state.is_world_process_zero:
            return
        report = {"step": state.global_step, "minutes": round(self.minutes, 3), **logs}
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(_line(report) + "\n")
