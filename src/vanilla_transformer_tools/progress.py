"""One look for the progress of all commands: a bar on a terminal, lines in a file or a pipe."""

import logging
import sys
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

    Without a total there is a count. After it come the details, in tqdm's format.
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

    Yields a function to be called after each line. The total may be unknown.
    """
    left = ", {remaining} left" if total else ""
    if not is_shown:
        yield lambda: None
    elif sys.stderr.isatty():
        with bar_on_terminal(label, total, f" lines, {{rate_fmt}}{left}", done) as bar:
            yield bar.update
    else:
        count = "{desc} {n:,}/{total:,}" if total else "{desc} {n:,}"
        yield _Reports(
            desc=label,
            total=total,
            initial=done,
            bar_format=f"{count} lines, {{rate_noinv:,.2f}} lines/s{left}",
            smoothing=0,
            mininterval=SECONDS_BETWEEN_REPORTS,
            miniters=1,
            delay=SECONDS_BETWEEN_REPORTS,
        ).update


class _Reports(tqdm):
    """Prints a line at each refresh, instead of moving a bar."""

    monitor_interval = 0

    def update(self, n: float | None = 1) -> bool | None:
        """Counts lines."""
        if self.n == self.initial:
            # The others of its window come with the first, which would seem to be as slow.
            self.last_print_t = self._time()
        done: bool | None = super().update(n)
        return done

    def display(self, *_: Any, **__: Any) -> None:
        """Prints the number of lines."""
        print(self, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Prints nothing more."""


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
