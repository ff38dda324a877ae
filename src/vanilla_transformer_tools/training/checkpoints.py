"""Whole checkpoints: each is closed by a list of its files, and all files are as listed."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accelerate import PartialState
from safetensors import SafetensorError
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from vanilla_transformer_tools.files import share_weights, write_lines
from vanilla_transformer_tools.saved_folder import (
    FILES_FILE,
    describe_files,
    differs,
    leads_out,
    read_object,
)

# Marks a checkpoint that an early stop saved between the planned ones.
INTERIM_FILE = "interim"

# Beginning of the names of the optimizer's state, and its file under FSDP.
_OPTIMIZER_STATE = "optimizer"
_SHARDED_OPTIMIZER_STATE = "optimizer.bin"

# Beginning of the names of the weights: one file, or shards and their index.
_WEIGHTS = "model"


def close_checkpoint(folder: Path) -> None:
    """Lists the files of a checkpoint with sizes and checksums, which declares it whole.

    Args:
        folder: Folder of the checkpoint, with all its other files.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    share_weights(folder)
    names = [path.relative_to(folder).as_posix() for path in files if path.name != FILES_FILE]
    write_lines(
        folder / FILES_FILE, [json.dumps(describe_files(folder, names, "xxh3_128"), indent=2)]
    )


@contextmanager
def failed_writes_named(folder: Path) -> Iterator[None]:
    """Raises an `OSError` where torch or safetensors raise another error for a failed write.

    Args:
        folder: Where they write.
    """
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(
            f"Saving into {folder} failed: {error}. Check that the disk has room for two more "
            "checkpoints and that the folder is writable, then continue with --resume."
        ) from error


def reopen_checkpoint(folder: Path) -> None:
    """Removes the list of files of a checkpoint that is about to be overwritten."""
    (folder / FILES_FILE).unlink(missing_ok=True)


def closed_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that were saved completely, oldest first."""
    return [path for path in _checkpoints(folder) if (path / FILES_FILE).is_file()]


def with_intact_weights(checkpoints: Sequence[Path]) -> list[Path]:
    """The closed checkpoints whose weights are as they were saved; prints why others are not."""
    intact = []
    for checkpoint in checkpoints:
        if fault := next(_damage(checkpoint, _WEIGHTS), None):
            PartialState().print(f"{checkpoint.name} is skipped: {fault}")
        else:
            intact.append(checkpoint)
    return intact


def resumable_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint of a run.

    Args:
        folder: Folder of the run.

    Returns:
        The checkpoint, or None; and why each newer one is skipped.
    """
    skipped: dict[Path, str] = {}
    for checkpoint in reversed(_checkpoints(folder)):
        fault = next(_faults(checkpoint), None)
        if fault is None:
            return checkpoint, skipped
        skipped[checkpoint] = fault
    return None, skipped


def check_optimizer(checkpoint: Path, is_sharded: bool) -> None:
    """Rejects resuming with FSDP a run that began without it, and the other way round.

    Args:
        checkpoint: Has the state of an optimizer.
        is_sharded: Whether this run divides the model among processes.

    Raises:
        ValueError: If the state is of the other kind.
    """
    was_sharded = (checkpoint / _SHARDED_OPTIMIZER_STATE).is_file()
    if was_sharded != is_sharded:
        before, now = ("with" if flag else "without" for flag in (was_sharded, is_sharded))
        raise ValueError(
            f"--resume continues {checkpoint.name} {before} FSDP, as it was trained, got a run "
            f"{now} it. Launch it as before, with any number of processes, or train in another "
            "folder, with --init_from this checkpoint."
        )


def delete_unclosed(folder: Path) -> None:
    """Removes checkpoints whose saving was interrupted."""
    for checkpoint in _checkpoints(folder):
        if not (checkpoint / FILES_FILE).is_file():
            shutil.rmtree(checkpoint)


def delete_interim(last: Path) -> None:
    """Deletes the checkpoints of early stops, which a run that went on would not have.

    Args:
        last: The checkpoint of the run that was saved last; it stays.
    """
    for checkpoint in _checkpoints(last.parent):
        if (checkpoint / INTERIM_FILE).is_file() and checkpoint != last:
            shutil.rmtree(checkpoint, ignore_errors=True)


def delete_oldest(last: Path, limit: int | None, best: str | None) -> None:
    """Deletes the checkpoints of a run that are oldest, but neither the best nor the last one.

    Transformers' own goes by times, which a copy of the folder changes.

    Args:
        last: The checkpoint that was saved last.
        limit: Number of checkpoints that may stay; None or 0: all.
        best: Path of the best one.
    """
    if not limit:
        return
    checkpoints = _checkpoints(last.parent)
    # Those of a higher number are damaged: a resumed run has skipped them.
    checkpoints.sort(key=lambda path: update_of(path.name) <= update_of(last.name))
    kept = {last, *([Path(best)] if best else [])}
    others = [path for path in checkpoints if path not in kept]
    for checkpoint in others[: max(0, len(checkpoints) - max(limit, len(kept)))]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def checkpoint_folder(run: Path, update: int) -> Path:
    """Folder of the checkpoint that a run saves after an update."""
    return run / f"{PREFIX_CHECKPOINT_DIR}-{update}"


def read_state(checkpoint: str | Path) -> TrainerState:
    """Trainer's state when it saved a checkpoint."""
    return TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))


def update_of(checkpoint: str) -> int:
    """Number of the update after which a checkpoint was saved, by the name of its folder."""
    return int(checkpoint.rpartition("-")[2])


def _checkpoints(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, in the order of their updates."""
    numbered = {
        int(number): path
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and (number := path.name.rpartition("-")[2]).isdecimal()
    }
    return [numbered[number] for number in sorted(numbered)]


def _faults(checkpoint: Path) -> Iterator[str]:
    """Why a checkpoint is not whole."""
    if not (checkpoint / FILES_FILE).is_file():
        yield f"it has no {FILES_FILE}, so the run ended while saving it"
        return
    yield from _damage(checkpoint)
    if not any(path.name.startswith(_OPTIMIZER_STATE) for path in checkpoint.iterdir()):
        yield "it holds no state of the optimizer (--save_only_model)"
    # Somebody may remove files while the list of them is made.
    if not (checkpoint / CONFIG_NAME).is_file():
        yield f"it has no {CONFIG_NAME}"


def _damage(checkpoint: Path, prefix: str = "") -> Iterator[str]:
    """How the files of a closed checkpoint whose names have a prefix differ from its list."""
    try:
        files = read_object(checkpoint / FILES_FILE)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    for name, expected in files.items():
        if not name.startswith(prefix):
            continue
        if leads_out(name):
            yield f"its {FILES_FILE} lists {name}, which is not in it"
        elif not (checkpoint / name).is_file():
            yield f"its {name} is missing"
        elif differs(checkpoint / name, expected):
            yield f"its {name} has other bytes than were saved"
