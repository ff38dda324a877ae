"""Resuming: where a run continues, what may have changed since, and whose folder it is."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from vanilla_transformer_tools.saved_folder import (
    CARD_FILE,
    LOG_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FOLDER,
    read_object,
    write_run,
)
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import DROPPED_FILE
from vanilla_transformer_tools.training.checkpoints import (
    closed_checkpoints,
    resumable_checkpoint,
)
from vanilla_transformer_tools.training.fine_tuning import ADAPTER_FOLDER
from vanilla_transformer_tools.training.run_record import CURVES_FILE

# Fields of the record that are kept of each previous run.
_FIELDS_OF_A_RUN = (
    "first_update",
    "command",
    "hardware",
    "python",
    "versions",
    "commit",
    "sha256",
    "settings",
    "arguments",
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
_ARGUMENTS_THAT_MAY_CHANGE = {
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "per_device_eval_batch_size",
    "predict_with_generate",
    "prediction_loss_only",
    "do_train",
    "do_eval",
    "do_predict",
    "report_to",
    "run_name",
    "project",
    "disable_tqdm",
    "load_best_model_at_end",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "local_rank",
    "ddp_timeout",
    "ddp_find_unused_parameters",
    "use_cpu",
    "skip_memory_metrics",
}
_PREFIXES_THAT_MAY_CHANGE = (
    "eval_",
    "include_",
    "log_",
    "logging_",
    "save_",
    "trackio_",
)

# Patterns of the files that training writes: before its first checkpoint, and after it.
_EARLY_FILES = (RUN_FILE, LOG_FILE, DROPPED_FILE)
_LATE_FILES = (
    CARD_FILE,
    RESULTS_FILE,
    CURVES_FILE,
    TARGET_FOLDER,
    ADAPTER_FOLDER,
    "generation_config.json",
    "model*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "*_vanilla_transformer.py",
)
_LOCK_FILE = ".lock"


def find_checkpoint(settings: TrainSettings, folder: Path) -> Path | None:
    """The checkpoint to resume from; None for a new run, which needs a free folder.

    Args:
        settings: Say whether the run is resumed.
        folder: Folder of the run.

    Raises:
        ValueError: If a run would overwrite another, or has no whole checkpoint to resume from.
    """
    if not settings.resume:
        check_free(folder)
        return None
    checkpoint, skipped = resumable_checkpoint(folder)
    faults = [f"{path.name} is skipped: {fault}" for path, fault in skipped.items()]
    if checkpoint is None:
        raise ValueError(
            "\n".join(
                [
                    f"--resume needs a whole checkpoint in --output_dir, got none in {folder}. "
                    "Leave --resume out and choose another folder to start from the beginning.",
                    *faults,
                ]
            )
        )
    for fault in faults:
        PartialState().print(fault)
    return checkpoint


def previous_record(folder: Path) -> dict[str, Any]:
    """The record of the run that is resumed in a folder.

    Raises:
        ValueError: If there is none.
    """
    if not (folder / RUN_FILE).is_file():
        raise ValueError(
            f"--resume needs the {RUN_FILE} of the run in --output_dir, got none in {folder}. "
            "Restore it, or train in another folder, with --init_from a checkpoint."
        )
    return read_object(folder / RUN_FILE)


def continued_record(previous: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a resumed run, which keeps what each previous run was made from.

    Args:
        previous: Record of the run so far.
        run: Record of the run that is about to begin.

    Raises:
        ValueError: If anything differs that changes an update; the message names all.
    """
    faults = [
        f"--{name} was {before!r}, got {now!r}"
        for part, may_change in (
            ("settings", _SETTINGS_THAT_MAY_CHANGE),
            ("arguments", _ARGUMENTS_THAT_MAY_CHANGE),
        )
        for name, before, now in _differences(previous.get(part, {}), run[part])
        if name not in may_change
        and not (part == "arguments" and name.startswith(_PREFIXES_THAT_MAY_CHANGE))
    ]
    faults += [
        f"{name} has other content than it had (SHA-256 {before[:12]}..., got {now[:12]}...)"
        for name, before, now in _differences(previous.get("sha256", {}), run["sha256"])
    ]
    if faults:
        raise ValueError(
            "--resume continues a run with its own settings and data, got others:\n"
            + "\n".join(faults)
            + "\nGive the same ones, or train in another folder, with --init_from this one."
        )
    kept = {name: previous[name] for name in _FIELDS_OF_A_RUN if name in previous}
    return {**previous, **run, "previous_runs": [*previous.get("previous_runs", []), kept]}


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Fields of both records whose values differ; fields that one release lacks are ignored."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            yield name, before[name], now[name]


def check_free(folder: Path) -> None:
    """Rejects a folder that holds a run, or files that training would overwrite.

    The files of a run that ended before its first whole checkpoint may be overwritten.

    Raises:
        ValueError: If there are any.
    """
    is_abandoned = _is_abandoned(folder)
    checkpoints = (
        closed_checkpoints(folder)
        if is_abandoned
        else list(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    )
    if checkpoints or (folder / CONFIG_NAME).exists():
        resume = "Pass --resume to continue it, choose" if closed_checkpoints(folder) else "Choose"
        raise ValueError(
            f"--output_dir {folder} already holds a run. {resume} another folder, or delete it."
        )
    written = _LATE_FILES if is_abandoned else _EARLY_FILES + _LATE_FILES
    taken = sorted(path.name for pattern in written for path in folder.glob(pattern))
    if taken:
        raise ValueError(
            f"--output_dir {folder} must hold nothing that training writes, got "
            f"{', '.join(taken)}. Choose another folder, or move these away."
        )


def discard_stopped(folder: Path) -> None:
    """Removes the model of a run that two signals ended before its first checkpoint.

    Nothing can resume such a run, so a command that continues without --resume starts it again.
    """
    file = folder / RUN_FILE
    run = read_object(file) if file.is_file() else {}
    if not run.get("interrupted") or closed_checkpoints(folder):
        return
    for pattern in (CONFIG_NAME, *_LATE_FILES):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Last, so that a kill meanwhile leaves a folder for which this works again.
    write_run(folder, {name: value for name, value in run.items() if name != "weights"})


def _is_abandoned(folder: Path) -> bool:
    """Whether a folder has the record of a run that did not finish."""
    file = folder / RUN_FILE
    try:
        run = read_object(file) if file.is_file() else {}
    except ValueError:
        return False
    return "settings" in run and "weights" not in run


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Locks a folder, created if absent, for this process; killing the process frees it.

    Raises:
        ValueError: If another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"--output_dir {folder} is in use by another training that has not ended. Wait for "
            "it, or choose another folder."
        ) from error
    try:
        yield
    finally:
        # Deleted while it is held, so that it is never the lock of another process.
        (folder / _LOCK_FILE).unlink(missing_ok=True)
        lock.release()
