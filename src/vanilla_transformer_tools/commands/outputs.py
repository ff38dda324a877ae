"""Output files: checks before the work begins, and rows that are written whole or not at all."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vanilla_transformer_tools.settings import TranslateSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translation

if sys.platform != "win32":
    import fcntl


def check_output(
    path: Path, *, inputs: Iterable[str | None] = (), models: Sequence[str] = ()
) -> None:
    """Rejects an output that cannot be written or would overwrite an input of the command.

    Args:
        path: The output; it is not changed.
        inputs: Files that the command reads; None and missing files are ignored.
        models: Folders or Hub names of the models that the command loads.

    Raises:
        ValueError: If it is an input, a file of a model, a folder, or a file that is open already,
            such as /dev/stdout can be.
        OSError: If it cannot be written.
    """
    for name in inputs:
        if name and path.exists() and Path(name).exists() and path.samefile(name):
            raise ValueError(
                f"--output {path} would overwrite {name!r}, which is an input. Choose another file."
            )
    for model in models:
        if _is_file_of(path, Path(model)):
            raise ValueError(
                f"--output {path} would be a file of the model {model!r}. Choose another file."
            )
    if path.is_dir():
        raise ValueError(f"--output must be a file, got the folder {str(path)!r}.")
    if path.exists() and not path.is_file():
        # A device or a pipe.
        return
    folder = path.parent.resolve()
    if path.is_symlink() and (folder == Path("/dev") or folder.is_relative_to("/proc")):
        # Such as /dev/stdout, which would be replaced itself.
        raise ValueError(
            f"--output {path} stands for the file {str(path.resolve())!r}, which is open already. "
            "Name a file that is not."
        )
    check_room(path, "--output")


def _is_file_of(path: Path, model: Path) -> bool:
    """Whether an output would be a file of a saved model, itself or through a link."""
    # The name in the folder and what it links to: in the Hub's cache that is a blob elsewhere.
    places = (path.parent.resolve() / path.name, path.resolve())
    inside = [place for place in places if place.is_relative_to(model.resolve())]
    if not inside or not model.is_dir():
        return False
    from vanilla_transformer_tools.saved_folder import is_reserved_name

    return any(map(is_reserved_name, inside))


def check_room(path: Path, option: str) -> None:
    """Rejects a file that cannot be created or replaced.

    Args:
        path: The file; it is not changed.
        option: Option that names the file, for the error.

    Raises:
        OSError: If it cannot.
    """
    # As long as the name of a temporary file, so that a name that is too long fails here.
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


@contextmanager
def opened_output(
    path: Path | None, kept: int = 0, found: int = 0
) -> Iterator[Callable[[bytes], None]]:
    """Opens where rows are written: a locked file, a device, a pipe, or standard output.

    Args:
        path: Path of a file, which need not exist, of a device or of a pipe; None: standard output.
        kept: Bytes of a file to keep; the rest is cut off.
        found: Bytes that a file must have now.

    Yields:
        A function that writes and flushes rows: to a file all of them or none.

    Raises:
        ValueError: If another translation has locked or changed the file.
        OSError: If it cannot be opened or written, or its rows cannot be kept, as on a disk that
            fails.
    """
    if path is None:
        yield partial(_write, sys.stdout.buffer, "Standard output", False)
    elif path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as device:
            yield partial(_write, device, repr(str(path)), False)
    else:
        path.touch()
        with open_alone(path) as file:
            if (now := path.stat().st_size) != found:
                raise ValueError(
                    f"--output {path} was changed while the model was loaded: expected {found:,} "
                    f"bytes, got {now:,}. Pass --resume to continue it, or choose another file."
                )
            file.truncate(kept)
            file.seek(kept)
            try:
                yield partial(_write, file, repr(str(path)), True)
            finally:
                # A disk that fails may report it only now.
                os.fsync(file.fileno())


def _write(file: BinaryIO | FileIO, name: str, is_file: bool, rows: bytes) -> None:
    size = file.tell() if is_file else 0
    rest = memoryview(rows)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = ""
        if is_file:
            with suppress(OSError):
                file.truncate(size)
            hint = " Its lines are complete; with --input, --resume continues after them."
        raise OSError(f"{name} can no longer be written: {error.strerror}.{hint}") from error


def open_alone(path: Path) -> FileIO:
    """Opens a file for writing and locks it until it is closed.

    Raises:
        ValueError: If another translation has locked it.
    """
    # Unbuffered: on a full disk, a buffer would be written again when the file is closed.
    file = path.open("r+b", buffering=0)
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(
                f"--output {path} is in use by another translation that has not ended. Wait for "
                "it, or choose another file."
            ) from error
        except OSError:
            # A file system without locks.
            pass
    return file


def written_lines(path: Path, rows_per_line: int) -> tuple[int, int]:
    """Number of input lines of which an output has all rows, and their bytes."""
    lines = size = rows = rows_size = 0
    with path.open("rb") as file:
        for row in file:
            if not row.endswith(b"\n"):
                break
            rows += 1
            rows_size += len(row)
            if rows % rows_per_line == 0:
                lines, size = lines + 1, rows_size
    return lines, size


def format_rows(
    translation: "Translation", number: int, settings: TranslateSettings
) -> Iterator[str]:
    """Output rows for one line of the input, without line ends.

    Args:
        translation: The best one, with its alternatives.
        number: Number of the line in the input, counted from 1.
        settings: With `scores` or several translations, a row has number, score and text,
            separated by tabs; with `details` it is one JSON object with all translations.
    """
    if settings.details:
        hypotheses = list(map(_describe, translation.ranked))
        yield json.dumps({"line": number, "hypotheses": hypotheses}, ensure_ascii=False)
        return
    scores = settings.scores or settings.n_best > 1
    for hypothesis in translation.ranked:
        yield f"{number}\t{hypothesis.score:.4f}\t{hypothesis.text}" if scores else hypothesis.text


def _describe(hypothesis: "Translation") -> dict[str, object]:
    return {
        "text": hypothesis.text,
        "score": None if hypothesis.score is None else round(hypothesis.score, 4),
        "reached_limit": hypothesis.reached_limit,
        "source_tokens": hypothesis.source_tokens,
        "tokens": hypothesis.tokens,
        "token_scores": [round(score, 4) for score in hypothesis.token_scores],
        # The format of Pharaoh and fast_align.
        "alignment": " ".join(f"{source}-{target}" for source, target in hypothesis.alignment),
    }
