"""What a run leaves of itself: the record that repeats and continues it, its log, and curves."""

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerState, TrainingArguments

from vanilla_transformer_tools.figures import new_figure, save_figure
from vanilla_transformer_tools.files import checksum, checksum_of_all, write_lines
from vanilla_transformer_tools.saved_folder import LOG_FILE, RUN_FILE
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.privacy import clean_record

# A picture of the log.
CURVES_FILE = "curves.svg"

_NOT_FINITE = ("nan", "inf", "-inf")

_PACKAGES = (
    "vanilla-transformer",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "sacrebleu",
)

# Length of a run, its reports, what it saves and where: none of these changes an update, or the way
# in which checkpoints are scored.
_SETTINGS_THAT_MAY_CHANGE = {
    "resume",
    "data",
    "minutes",
    "max_minutes",
    "finish_within",
    "metrics",
    "validation_sets",
    "average_last",
    "early_stopping_patience",
    "language",
    "dataset_tags",
    "license",
    "teacher_max_tokens_per_batch",
}

# Names of Trainer's arguments, or how they begin.
_ARGUMENTS_THAT_MAY_CHANGE = (
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "per_device_eval_batch_size",
    "predict",
    "do_",
    "report_to",
    "run_name",
    "project",
    "disable_tqdm",
    "load_best_model_at_end",
    "dataloader_",
    "local_rank",
    "ddp_timeout",
    "ddp_find_unused_parameters",
    "use_cpu",
    "skip_memory_metrics",
    "eval_",
    "include_",
    "log_",
    "logging_",
    "save_",
    "trackio_",
)


def hardware(device: torch.device) -> str:
    """Human-readable name of the devices that a run on `device` uses."""
    if device.type == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if device.type == "mps":
        return f"Apple GPU, {platform.processor()}"
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def describe_run(
    settings: TrainSettings, arguments: TrainingArguments, first_update: int
) -> dict[str, Any]:
    """Settings, data, versions and hardware of a run, as JSON that may be published.

    It holds no secrets, and only the last part of each path; `sha256` identifies the data, and
    `first_update` is the number of updates before it, in a run that is resumed.
    """
    record = {
        "first_update": first_update,
        "command": sys.argv,
        "hardware": hardware(arguments.device),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in _PACKAGES},
        "commit": _commit(),
        "sha256": _checksums(settings),
        "settings": dataclasses.asdict(settings),
        "arguments": arguments.to_dict(),
    }
    return clean_record(record)


def continued_record(previous: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a resumed run, which keeps what each previous run was made from.

    Args:
        previous: Record of the run so far; empty if there is none.
        run: Description of the run that is about to begin.

    Raises:
        ValueError: If there is no record, or if anything differs that changes an update; the
            message names all.
    """
    if not previous:
        raise ValueError(
            f"--resume needs the {RUN_FILE} of the run in --output_dir, got none. Restore it, or "
            "train in another folder, with --init_from a checkpoint."
        )
    # Fields that one release lacks are ignored.
    settings, arguments, sums = (
        [
            (name, before, run[part][name])
            for name, before in previous.get(part, {}).items()
            if run[part].get(name, before) != before
        ]
        for part in ("settings", "arguments", "sha256")
    )
    changed = [each for each in settings if each[0] not in _SETTINGS_THAT_MAY_CHANGE]
    changed += [each for each in arguments if not each[0].startswith(_ARGUMENTS_THAT_MAY_CHANGE)]
    faults = [f"--{name} was {before!r}, got {now!r}" for name, before, now in changed]
    faults += [
        f"{name} has other content than it had (SHA-256 {before[:12]}..., got {now[:12]}...)"
        for name, before, now in sums
    ]
    if faults:
        raise ValueError(
            "--resume continues a run with its own settings and data, got others:\n"
            + "\n".join(faults)
            + "\nGive the same ones, or train in another folder, with --init_from this one."
        )
    kept = {name: previous[name] for name in run if name in previous}
    return {**previous, **run, "previous_runs": [*previous.get("previous_runs", []), kept]}


def _checksums(settings: TrainSettings) -> dict[str, str]:
    """SHA-256 by path of the files and folders that a run learns from; the Hub's are left out."""
    validation = chain.from_iterable(settings.paths_of_validation.values())
    paths = [*settings.train, *validation, *(settings.filter_overlap or ())]
    paths += [path for path in (settings.symbols, settings.alignments) if path]
    checksums = {path: checksum(path) for path in paths if Path(path).is_file()}
    for path in filter(os.path.isdir, paths):
        # Those are copies that `datasets` computed from the dataset.
        files = [file for file in Path(path).rglob("*") if not file.name.startswith("cache-")]
        checksums[path] = checksum_of_all(files)
    if settings.init_from and os.path.isdir(settings.init_from):
        weights = Path(settings.init_from).glob("*.safetensors")
        checksums[settings.init_from] = checksum_of_all(weights)
    return checksums


def _commit() -> str | None:
    """Commit of the source tree that this package runs from; None for an installed wheel."""
    # A wheel may be installed inside of another repository, which does not list its files.
    git = ["git", "-C", str(Path(__file__).parent)]
    commands = ["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty"]
    try:
        for command in commands:
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


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

    Reports of the loss also have `outside_step`: the share, 0 to 1, of the time since the previous
    report that was spent outside of forward and backward passes and optimizer, mostly on waiting
    for batches. Evaluation has a report of its own, so its time is not included.

    Args:
        path: File of the log.
        first_update: Update of the checkpoint that a run is resumed from. Later reports are
            removed, because they will be written again, but their minutes count. 0: an existing
            file is replaced; its run ended before its first checkpoint.
    """

    def __init__(self, path: Path, first_update: int) -> None:
        self.path = path
        reports = read_log(path) if first_update else []
        self.started = time.monotonic() - sum(60 * report["minutes"] for report in reports[-1:])
        if PartialState().is_main_process:
            kept = [report for report in reports if report["step"] <= first_update]
            if kept:
                write_lines(path, map(_line, kept))
            else:
                path.unlink(missing_ok=True)
        # Seconds inside of updates since the last report, and the time of that report.
        self.inside = 0.0
        self.since: float | None = None

    @property
    def minutes(self) -> float:
        """Minutes of training, those before it was resumed included."""
        return (time.monotonic() - self.started) / 60

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Starts the clock of an update, whose batches have been loaded."""
        self.step_began = time.monotonic()
        self.since = self.since or self.step_began

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Stops the clock of an update."""
        self.inside += time.monotonic() - self.step_began

    def on_log(
        self, _: Any, state: TrainerState, *others: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Writes one report."""
        now = time.monotonic()
        if self.since is None:
            # There was no update, so the mean loss is of nothing.
            logs = {name: value for name, value in logs.items() if name != "train_loss"}
        else:
            if "loss" in logs:
                logs = logs | {"outside_step": round(1 - self.inside / (now - self.since), 4)}
            self.since = now
        self.inside = 0.0
        if not state.is_world_process_zero:
            return
        report = {"step": state.global_step, "minutes": round(self.minutes, 3), **logs}
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(_line(report) + "\n")


def plot_curves(folder: Path, metric: str) -> Path:
    """Draws the reports in a run's `log.jsonl` over minutes of training.

    Args:
        folder: Folder of the run.
        metric: Validation score to draw, such as "bleu".

    Returns:
        The picture, `curves.svg` in the folder.

    Raises:
        ImportError: If matplotlib is not installed; the message says how to install it.
        OSError: If the log cannot be read, or the picture cannot be written.
    """
    figure = new_figure(6.4, 7.2)
    panels = {
        "cross-entropy a token, nats": {"loss": "training", "eval_loss": "validation"},
        metric: {f"eval_{metric}": "validation, greedy"},
        "learning rate": {"learning_rate": "schedule"},
    }
    reports = read_log(folder / LOG_FILE)
    for axes, (title, curves) in zip(
        figure.subplots(len(panels), sharex=True), panels.items(), strict=True
    ):
        axes.set_ylabel(title)
        for name, label in curves.items():
            points = [(report["minutes"], report[name]) for report in reports if name in report]
            if points:
                axes.plot(*zip(*points, strict=True), label=label)
                axes.legend()
    axes.set_xlabel("minutes")
    return save_figure(figure, folder / CURVES_FILE)
