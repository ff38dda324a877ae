"""Checks of what a command is going to write, before it does the work."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

# Of the files that a model is made of or described by.
_MODEL_SUFFIXES = (".json", ".jsonl", ".safetensors", ".bin", ".onnx", ".py", ".md")


def check_output(
    path: Path,
    *,
    option: str = "--output",
    inputs: Iterable[str | None] = (),
    models: Sequence[str] = (),
) -> None:
    """Refuses an output that cannot be written or would overwrite what the command reads.

    Args:
        path: Of the output, which is not changed.
        option: Its name on the command line.
        inputs: Files that the command reads; None and what is no file are ignored.
        models: Folders or Hub names of the models that it uses.

    Raises:
        ValueError: If it is an input, a file of a model, or a folder.
        OSError: If it cannot be written.
    """
    for name in inputs:
        if name and path.exists() and Path(name).exists() and path.samefile(name):
            raise ValueError(
                f"{option} {path} is the file {name!r}, which is read, and would overwrite it. "
                "Choose another file."
            )
    for model in models:
        is_inside = Path(model).is_dir() and path.resolve().is_relative_to(Path(model).resolve())
        if is_inside and path.suffix in _MODEL_SUFFIXES:
            raise ValueError(
                f"{option} {path} would be a file of the model {model!r}. Choose another file."
            )
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {str(path)!r}.")
    if path.exists() and not path.is_file():
        # A device or a pipe; no other file is written beside it.
        return
    check_room(path, option)


def check_room(path: Path, option: str) -> None:
    """Refuses a file that cannot be created or replaced in its folder.

    Args:
        path: Of the file, which is not changed.
        option: Who asks for it, for the error.

    Raises:
        OSError: If it cannot.
    """
    # Named like a file that is written aside, so that too long a name fails here too.
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        probe.touch()
        probe.unlink()
        if path.exists():
            path.open("r+b").close()
    except OSError as error:
        raise OSError(
            f"{option} cannot be written to {str(path)!r}: {error.strerror}. Make its folder, or "
            "choose another one."
        ) from error
