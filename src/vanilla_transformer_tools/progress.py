"""One look for the progress of all commands: a bar on a terminal, lines in a file or a pipe."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

# Between two reports on lines, in a file or a pipe.
SECONDS_BETWEEN_REPORTS = 60


@contextmanager
def bar_on_terminal(label: str, total: int | None, details: str, done: int = 0) -> Iterator[tqdm]:
    """A bar in the last line of the terminal; printed and logged lines appear above it.

    Args:
        label: Name of the activity.
        total: Number of units; None: unknown, and then there is a count without a bar.
        details: Text after the count, in tqdm's format.
        done: Number of units done before.
    """
    count = "{desc} |{bar}| {n:,}/{total:,}" if total else "{desc} {n:,}"
    with (
        tqdm(
            desc=label,
            total=total,
            initial=done,
            unit=" lines",
            bar_format=count + details,
            # The mean speed: lines are done in windows, so the latest speed says little.
            smoothing=0,
            dynamic_ncols=True,
            file=sys.stderr,
        ) as bar,
        _printing_above(),
    ):
        yield bar


@contextmanager
def line_progress(
    label: str, total: int | None, done: int = 0, *, is_shown: bool = True
) -> Iterator[Callable[[], Any]]:
    """Counts lines on standard error: in a bar on a terminal, otherwise in a report a minute.

    Args:
        label: Name of the activity.
        total: Number of lines; None: unknown.
        done: Number of lines done before.
        is_shown: False: nothing is printed.

    Yields:
        A function to be called after each line.
    """
    if not is_shown:
        yield lambda: None
    elif sys.stderr.isatty():
        left = ", {remaining} left" if total else ""
        with bar_on_terminal(label, total, f" lines, {{rate_fmt}}{left}", done) as bar:
            yield bar.update
    else:
        yield _LineReports(label, total, done).advance


class _LineReports:
    """Reports of the number of lines."""

    def __init__(self, label: str, total: int | None, done: int) -> None:
        self.label, self.total, self.first, self.done = label, total, done, done
        self.started = self.reported = time.monotonic()

    def advance(self) -> None:
        """Counts one line."""
        self.done += 1
        now = time.monotonic()
        if self.done == self.first + 1:
            # The others of its window come with it, and would seem to be as slow.
            self.reported = now
        if now - self.reported < SECONDS_BETWEEN_REPORTS:
            return
        self.reported = now
        rate = (self.done - self.first) / (now - self.started)
        of_total = left = ""
        if self.total is not None:
            of_total = f"/{self.total:,}"
            left = f", {duration((self.total - self.done) / rate)} left"
        print(
            f"{self.label} {self.done:,}{of_total} lines, {rate:,.2f} lines/s{left}",
            file=sys.stderr,
            flush=True,
        )


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any: `02:05`, `1:02:05`."""
    return tqdm.format_interval(seconds)


@contextmanager
def _printing_above() -> Iterator[None]:
    """Makes standard output, standard error and the handlers of logs print above a bar."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", [])]
    # One terminal shows both streams, and tqdm moves the bar out of the way of its own only.
    above = DummyTqdmFile(sys.stderr)
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not stream.isatty():
                continue
            setattr(sys, name, above)
            stack.callback(setattr, sys, name, stream)
            for handler in handlers:
                # Some look up the stream each time, and have none of their own.
                if vars(handler).get("stream") is stream:
                    handler.setStream(above)
                    stack.callback(handler.setStream, stream)
        yield
