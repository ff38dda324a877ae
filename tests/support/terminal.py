"""A pseudo-terminal in place of standard output and standard error."""

import os
import pty
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest


class Terminal:
    """What a user sees after all that was written."""

    def __init__(self, main: int) -> None:
        self._main = main
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # A terminal takes a few kilobytes only, so somebody must read while others write.
        while True:
            try:
                self._written += os.read(self._main, 4096)
            except OSError:
                # The other end has been closed.
                return

    def close(self, stream: TextIO) -> None:
        stream.close()
        self._reader.join()

    @property
    def lines(self) -> list[str]:
        """The lines of the screen after `close`, without the cursor's one if that is empty."""
        lines = [""]
        for part in self._written.decode().split("\n"):
            assert "\x1b" not in part, part
            for text in part.split("\r"):
                lines[-1] = text + lines[-1][len(text) :]
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        return lines[: -2 if not lines[-2] else -1]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Standard output and standard error go to a terminal of 100 columns, to be read afterwards."""
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, 100))
    screen = Terminal(main)
    stream = open(other, "w", encoding="utf-8")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        try:
            yield screen
        finally:
            screen.close(stream)
            os.close(main)
