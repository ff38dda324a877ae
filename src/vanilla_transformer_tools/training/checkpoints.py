"""The folder of a run: whose it is, and its checkpoints, each closed by a list of its files."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from vanilla_transformer_tools.files import locked, scratch_folder, share_weights, write_lines
from vanilla_transformer_tools.saved_folder import (
    CARD_FILE,
    FILES_FILE,
    LOG_FILE,
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FOLDER,
    describe_files,
    differs,
    read_object,
    write_run,
)
from vanilla_transformer_tools.text.filters import DROPPED_FILE, Corpus

_AVERAGE_FILE = "moving_average.safetensors"

# Marks a checkpoint that an early stop saved between the planned ones.
INTERIM_FILE = "interim"

# Beginning of the names of the optimizer's state.
_OPTIMIZER_STATE = "optimizer"

# Beginning of the names of the weights: one file, or shards and their index.
_WEIGHTS = "model"

# Patterns of the files that training writes: before its first checkpoint, and after it.
_EARLY_FILES = (RUN_FILE, LOG_FILE, DROPPED_FILE)
_LATE_FILES = (
    CARD_FILE,
    RESULTS_FILE,
    TARGET_FOLDER,
    "generation_config.json",
    "model*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "*_vanilla_transformer.py",
)
_LOCK_FILE = ".lock"


def close_checkpoint(folder: Path) -> None:
    """Lists the files of a checkpoint with sizes and checksums, which declares it whole."""
    share_weights(folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != FILES_FILE)
    described = describe_files(folder, (file.relative_to(folder).as_posix() for file in files))
    write_lines(folder / FILES_FILE, [json.dumps(described, indent=2)])


@contextmanager
def failed_writes_named(folder: Path) -> Iterator[None]:
    """Raises an `OSError` where a library raises another error for a failed write."""
    try:
        yield
    except Exception as error:
        # Tokenizers have no class of errors of their own; torch names the writer of its archives.
        is_of_torch = isinstance(error, RuntimeError) and re.search(
            "inline_container|Writer", str(error)
        )
        if not (isinstance(error, SafetensorError) or is_of_torch or type(error) is Exception):
            raise
        raise OSError(
            f"Saving into {folder} failed: {error}. Check that the disk has room for two more "
            "checkpoints and that the folder is writable, then continue with --resume."
        ) from error


def closed_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that were saved completely, oldest first."""
    return [path for path in _checkpoints(folder) if (path / FILES_FILE).is_file()]


def with_intact_weights(checkpoints: Sequence[Path]) -> list[Path]:
    """The closed checkpoints whose weights are as they were saved; prints why others are not."""
    intact = []
    for checkpoint in checkpoints:
        if fault := _damage(checkpoint, _WEIGHTS):
            PartialState().print(f"{checkpoint.name} is skipped: {fault}")
        else:
            intact.append(checkpoint)
    return intact


def delete_oldest(last: Path, limit: int | None, best: Path | None) -> None:
    """Deletes checkpoints of a run that are no longer needed; the best and the last one stay.

    Those are the checkpoints of early stops, which a run that continued would not have, and the
    oldest ones beyond a limit. Transformers' own rule goes by times, which a copy of the folder
    changes.

    Args:
        last: The checkpoint that was saved last.
        limit: Number of checkpoints that may stay; None or 0: all.
        best: The best one.
    """
    kept = {last, *([best] if best else [])}
    checkpoints = _checkpoints(last.parent)
    deleted = [path for path in checkpoints if (path / INTERIM_FILE).is_file() and path != last]
    if limit:
        checkpoints = [path for path in checkpoints if path not in deleted]
        # Those of a higher number are damaged: a resumed run has skipped them.
        checkpoints.sort(key=lambda path: update_of(path.name) <= update_of(last.name))
        others = [path for path in checkpoints if path not in kept]
        deleted += others[: max(0, len(checkpoints) - max(limit, len(kept)))]
    for checkpoint in deleted:
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


def _damage(checkpoint: Path, prefix: str = "") -> str | None:
    """How a checkpoint, or what has a prefix in it, differs from its list; None: not at all."""
    if not (checkpoint / FILES_FILE).is_file():
        return f"it has no {FILES_FILE}, so the run ended while saving it"
    try:
        files = read_object(checkpoint / FILES_FILE)
    except (ValueError, OSError) as error:
        return str(error)
    for name in (name for name in files if name.startswith(prefix)):
        if not (checkpoint / name).is_file():
            return f"its {name} is missing"
        if differs(checkpoint / name, files[name]):
            return f"its {name} has other bytes than were saved"
    return None


class MovingAverage(TrainerCallback):
    """Exponential moving average of the weights: decay * old + (1 - decay) * new at each update.

    It begins with the weights of the first update, whose share after n more is decay^n. Each
    checkpoint has a file of it.

    Args:
        decay: Share of the old average that stays; 0.999 looks back on about 1,000 updates.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Copies the model, with the average from the checkpoint of a resumed run."""
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        if state.global_step:
            folder = checkpoint_folder(Path(args.output_dir), state.global_step)
            self.average.module.load_state_dict(load_file(folder / _AVERAGE_FILE), strict=False)
            # At 0 it would begin anew.
            self.average.n_averaged.fill_(state.global_step)

    def on_step_end(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        """Adds the weights of an update."""
        self.average.update_parameters(model)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The average by name; tied tensors once, frozen ones not at all."""
        parameters = self.average.module.named_parameters()
        return {name: weight.detach() for name, weight in parameters if weight.requires_grad}

    def save(self, checkpoint: Path) -> None:
        """Puts the average into the folder of a checkpoint."""
        save_file(self.weights, checkpoint / _AVERAGE_FILE)


def find_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of a run; prints why newer ones are skipped.

    Raises:
        ValueError: If there is none to resume from.
    """
    skipped = []
    for checkpoint in reversed(_checkpoints(folder)):
        fault = _damage(checkpoint)
        if not (fault or any(checkpoint.glob(f"{_OPTIMIZER_STATE}*"))):
            fault = "it holds no state of the optimizer (--save_only_model)"
        if fault is None:
            break
        skipped.append(f"{checkpoint.name} is skipped: {fault}")
    else:
        needed = (
            f"--resume needs a whole checkpoint in --output_dir, got none in {folder}. Leave "
            "--resume out and choose another folder to start from the beginning."
        )
        raise ValueError("\n".join([needed, *skipped]))
    for line in skipped:
        PartialState().print(line)
    return checkpoint


def check_free(folder: Path) -> None:
    """Refuses a folder that holds a run, or files that training would overwrite.

    The files of a run that ended before its first whole checkpoint may be overwritten.

    Raises:
        ValueError: If there are any.
        OSError: If it cannot be made.
    """
    run: dict[str, Any] = {}
    with suppress(ValueError, OSError):
        run = read_object(folder / RUN_FILE)
    is_abandoned = "settings" in run and "weights" not in run
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
    # Trainer makes the folder only after the data have been read.
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with scratch_folder(place, ".new-"):
            pass
    except OSError as error:
        raise OSError(
            f"--output_dir cannot be written to {str(folder)!r}: {error.strerror}. Choose another "
            "folder."
        ) from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Locks a folder, created if absent, for this process; killing the process frees it.

    Raises:
        ValueError: If another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fault = (
        f"--output_dir {folder} is in use by another training that has not ended. Wait for it, or "
        "choose another folder."
    )
    with locked(folder / _LOCK_FILE, fault):
        yield


@contextmanager
def opened_run(
    folder: Path, checkpoint: Path | None, record: Mapping[str, Any], corpus: Corpus
) -> Iterator[None]:
    """Claims the folder of a run, and writes the facts that are known before training.

    They are the record, `run.json`, and the pairs that the filters dropped.
    """
    is_main = PartialState().is_main_process
    with claimed(folder) if is_main else nullcontext():
        if is_main:
            if not checkpoint:
                # Another run may have finished here while the pairs were read.
                check_free(folder)
            # Their saving was interrupted.
            for unclosed in {*_checkpoints(folder)} - {*closed_checkpoints(folder)}:
                shutil.rmtree(unclosed)
            write_run(folder, record)
            corpus.filtered.write_dropped(folder)
        yield
