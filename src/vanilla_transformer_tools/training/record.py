"""The record of a run, `run.json`: what it is made from, and what may change when it is resumed."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from vanilla_transformer_tools.files import checksum, checksum_of_all
from vanilla_transformer_tools.saved_folder import RUN_FILE
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.privacy import clean_record
from vanilla_transformer_tools.training.checkpoints import update_of
from vanilla_transformer_tools.training.machine import hardware
from vanilla_transformer_tools.training.plan import RunPlan

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
    "metrics",
    "average_last",
    "early_stopping_patience",
    "language",
    "dataset_tags",
    "license",
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


def record_of(plan: RunPlan, previous: Mapping[str, Any]) -> dict[str, Any]:
    """What `run.json` says before the first update; `previous` is empty for a new run.

    Raises:
        ValueError: If a run that is resumed has other settings or data than it had.
    """
    first_update = update_of(plan.checkpoint.name) if plan.checkpoint else 0
    run = describe_run(plan.settings, plan.arguments, first_update)
    if plan.checkpoint:
        run = continued_record(previous, run)
    elif plan.decisions:
        run["decisions"] = [asdict(decision) for decision in plan.decisions]
    return run | clean_record(plan.facts.record)


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
        "settings": asdict(settings),
        "arguments": arguments.to_dict(),
    }
    return clean_record(record)


def continued_record(previous: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a resumed run, which keeps what each previous run was made from.

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
    paths = [*settings.train, *settings.validation, *(settings.filter_overlap or ())]
    paths += [settings.symbols] if settings.symbols else []
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
