"""Lines from files, terminals and pipes, and outputs that hold whole lines at any moment."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from select import select
from typing import BinaryIO, cast

from vanilla_transformer_tools import files

# Seconds for which a pipe is empty before what has come is translated.
_MOMENT = 0.05
# Bytes that are read at once: what a pipe of Linux holds.
_BLOCK = 2**16


def file_lines(path: str) -> Iterator[str]:
    """Lines of a plain or compressed file, which may be empty."""
    return files.read_lines(path, may_be_empty=True)


def read_texts(
    texts: Sequence[str] = (), path: str | None = None
) -> tuple[Iterator[str], Callable[[], bool]]:
    """Lines of a file, or else of a command's arguments, or else of standard input.

    The function says whether another line is there now; if not, those before it need not wait.

    Raises:
        ValueError: If there are no arguments and standard input is closed.
    """
    if path or texts:
        return (file_lines(path) if path else iter(texts)), lambda: True
    if sys.stdin is None:
        raise ValueError("Standard input is closed. Give text as arguments, or in a file.")
    if sys.stdin.isatty():
        return typed_lines(), lambda: False
    pipe = PipedLines(cast(BufferedReader, sys.stdin.buffer))
    return files.decode_lines(pipe, "standard input"), pipe.has_next


def typed_lines() -> Iterator[str]:
    """Lines typed at a terminal, with a prompt if standard output is one too."""
    # Where standard output is no terminal, `input` would write the prompt there.
    prompt = "> " if sys.stdout.isatty() else ""
    with suppress(EOFError):
        while True:
            yield input(prompt)


class PipedLines(Iterator[bytes]):
    """Lines of a pipe or a file with their ends, and whether another one has arrived."""

    def __init__(self, stream: BufferedReader) -> None:
        self._stream = stream
        self._ahead = bytearray()
        self._has_ended = False

    def __next__(self) -> bytes:
        while not self._has_line():
            self._read()
        end = self._ahead.find(b"\n") + 1 or len(self._ahead)
        line = bytes(self._ahead[:end])
        del self._ahead[:end]
        if not line:
            raise StopIteration
        return line

    def has_next(self) -> bool:
        """Whether a line has arrived, or the end, or does so within a moment."""
        while not self._has_line():
            # Windows waits for sockets only, and a stream in memory has no number.
            with suppress(OSError, ValueError):
                if not select([self._stream], [], [], _MOMENT)[0]:
                    return False
            self._read()
        return True

    def _has_line(self) -> bool:
        # What is too long for a line is refused as one, instead of read to its end.
        is_too_long = len(self._ahead) > files.LONGEST_LINE
        return self._has_ended or is_too_long or b"\n" in self._ahead

    def _read(self) -> None:
        """Takes the bytes that are there, and waits only if there are none."""
        block = self._stream.read1(_BLOCK)
        self._ahead += block
        self._has_ended = not block


@contextmanager
def opened_output(path: Path | None, kept: int = 0) -> Iterator[Callable[[bytes], None]]:
    """Opens where rows are written: a file, a device, a pipe, or standard output.

    Args:
        path: Path of a file, which need not exist, of a device or of a pipe; None: standard output.
        kept: Bytes of a file to keep; the rest is cut off.

    Yields:
        A function that writes and flushes rows: to a file all of them or none.

    Raises:
        OSError: If it cannot be opened or written.
    """
    if path is None:
        yield lambda rows: _write(sys.stdout.buffer, "Standard output", rows)
        return
    with path.open("ab", buffering=0) as file:
        is_file = path.is_file()
        if is_file:
            file.truncate(kept)
        yield lambda rows: _write(file, repr(str(path)), rows, is_file=is_file)
        if is_file:
            # A disk that fails may report it only now.
            os.fsync(file.fileno())


def _write(file: BinaryIO | FileIO, name: str, rows: bytes, *, is_file: bool = False) -> None:
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
