"""Bars on terminals, reports elsewhere."""

import logging
import sys

import pytest

from vanilla_transformer_tools.progress import bar_on_terminal, line_progress

from .support.terminal import terminal


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test adds them."""
    seconds = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: seconds[0])
    return seconds


def test_what_is_printed_or_logged_appears_above_the_bar(monkeypatch):
    logger = logging.getLogger("tests.progress")
    with terminal(monkeypatch) as screen:
        stream = sys.stderr
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        with bar_on_terminal("train", 4, "") as bar:
            print("a", end=" ")
            print("line")
            bar.update(2)
            logger.warning("a warning")
            sys.stderr.write("two\nlines\n")
        logger.removeHandler(handler)

        assert sys.stdout is sys.stderr is handler.stream is stream

    *above, last = screen.lines
    assert above == ["a line", "a warning", "two", "lines"]
    assert last.startswith("train |██")
    assert last.endswith("| 2/4")


@pytest.mark.parametrize(
    ("total", "start", "end"),
    [(4, "translate |█", ", 00:00 left"), (None, "translate 4 lines, ", "s")],
)
def test_lines_are_counted_in_a_bar_on_a_terminal(monkeypatch, total, start, end):
    with terminal(monkeypatch) as screen, line_progress("translate", total, 1) as advance:
        for _ in range(3):
            advance()

    (line,) = screen.lines
    assert line.startswith(start)
    assert line.endswith(end)
    assert ("| 4/4 lines, " in line) == bool(total)


@pytest.mark.parametrize(
    ("total", "reports"),
    [
        (4000, ["2,061/4,000 lines, 1.00 lines/s, 32:19 left", "2,121/4,000 lines, 1.00 "]),
        (None, ["2,061 lines, 1.00 lines/s\n", "2,121 lines, 1.00 lines/s\n"]),
    ],
)
def test_lines_are_reported_once_a_minute_in_a_file(clock, capsys, total, reports):
    with line_progress("translate", total, 2000) as advance:
        for _ in range(150):
            clock[0] += 1
            advance()

    printed = capsys.readouterr()
    assert printed.out == ""
    for line, report in zip(printed.err.splitlines(keepends=True), reports, strict=True):
        assert line.startswith(f"translate {report}")


def test_first_line_of_a_window_does_not_stand_for_all(clock, capsys):
    with line_progress("translate", 4000) as advance:
        for _ in range(2):
            clock[0] += 200
            for _ in range(100):
                advance()

    assert capsys.readouterr().err == "translate 101/4,000 lines, 0.25 lines/s, 4:17:21 left\n"
