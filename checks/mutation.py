"""Breaks copies of the package, one line each, and finds the test that notices.

What costs most is importing torch and Transformers. It happens once, here; every mutant is tested
in a fork of this process, which then imports the broken copy of the package.
"""

import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import transformers.generation.utils
import transformers.trainer_seq2seq  # noqa: F401

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

# The tests of the Hub files, by their places below `tests`; those that notice most come first.
TESTS = (
    "modeling/parity",
    "modeling/loss",
    "training/r_drop",
    "modeling/configuration",
    "modeling/initialisation",
    "modeling/modeling",
    "modeling/attention",
    "modeling/positions",
    "modeling/dropout",
    "modeling/search",
    "modeling/generation",
    "modeling/saving",
    "modeling/remote_code",
    "modeling/caches",
    "modeling/attention_backends",
    "modeling/packing",
    "modeling/row_blocks",
    "training/trainer",
    "modeling/ecosystem",
    "modeling/variant_grid",
    "modeling/variants",
    "modeling/talking_heads",
    "modeling/position_types",
    "modeling/softmax",
)


@dataclass(frozen=True)
class Mutant:
    """A defect of one line in one file.

    Args:
        name: What is wrong, in plain words.
        file: Its path below `src`.
        old: Text that occurs exactly once in the file.
        new: What stands there instead.
        first: The test file to begin with; by default the one that mirrors the file, and the
            oracle's for the model.
    """

    name: str
    file: str
    old: str
    new: str
    first: str = ""

    def path(self, source: Path) -> Path:
        """The file in the folder `source`, which is `src` or a copy of it."""
        return source / self.file

    def first_test(self) -> str:
        """The test file to begin with, by its place below `tests`; there may be none."""
        package, *wing, name = Path(self.file).with_suffix("").parts
        if package.endswith("_cli"):
            wing = ["cli"]
        mirrored = "/".join([*wing, name.removesuffix("_vanilla_transformer")])
        return self.first or mirrored.replace("modeling/modeling", "modeling/parity")

    def break_copy(self, source: Path) -> None:
        """Writes the defect into the copy of `src` in the folder `source`."""
        text = self.path(source).read_text(encoding="utf-8")
        self.path(source).write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Args:
        test: The first test that failed; None: all passed, the mutant survives.
        fault: Why there is no verdict on the mutant; empty where there is one.
        output: What pytest printed.
        seconds: How long it took.
    """

    test: str | None
    fault: str
    output: str
    seconds: float


class FirstFailure:
    """A plugin of pytest that keeps the name of the first test that fails."""

    test: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Looks at a test, its fixtures included."""
        self.look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Looks at a test file."""
        self.look_at(report)

    def look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keeps the first."""
        if report.failed and self.test is None:
            self.test = report.nodeid


def load_mutants(path: Path) -> list[Mutant]:
    """Reads a TOML file with a list of tables for each broken file.

    Raises:
        ValueError: If an old text does not occur exactly once in its file.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants = [Mutant(file=file, **fields) for file, rows in tables.items() for fields in rows]
    texts = {mutant.file: mutant.path(SOURCE).read_text(encoding="utf-8") for mutant in mutants}
    counts = {mutant.name: texts[mutant.file].count(mutant.old) for mutant in mutants}
    stale = [f"{name}: {count} times" for name, count in counts.items() if count != 1]
    if stale:
        raise ValueError(
            f"Each `old` of {path.name} must occur once in its file; bring these up to date:\n"
            + "\n".join(stale)
        )
    return mutants


def path_of(name: str) -> str:
    """Path of a test file, from its place below `tests`."""
    folder, _, stem = name.rpartition("/")
    return str(Path("tests", folder, f"test_{stem}.py"))


def choose_tests(mutants: list[Mutant]) -> list[str]:
    """`TESTS`, and the test files that mirror broken files beside them."""
    mirrored = {mutant.first_test() for mutant in mutants} - set(TESTS)
    return [*TESTS, *sorted(name for name in mirrored if (ROOT / path_of(name)).exists())]


def judge(
    mutants: list[Mutant | None], tests: list[str], folder: Path, jobs: int, limit: float
) -> Iterator[tuple[Mutant | None, Verdict]]:
    """Runs the tests on each mutant; yields in the order in which they finish.

    Args:
        mutants: None stands for the package as it is.
        tests: Test files by their places below `tests`.
        folder: Where the copies go.
        jobs: Processes at the same time.
        limit: Seconds after which a process is ended.
    """
    torch.set_num_threads(1)
    context = get_context("fork")
    waiting, running = list(mutants), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            place = Path(tempfile.mkdtemp(dir=folder))
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=run_tests, args=(mutant, tests, place, writer))
            process.start()
            # Only the child holds the other end: when it dies, there is nothing left to read.
            writer.close()
            running[reader] = mutant, process, place, time.monotonic()
        ready = wait(running, timeout=1)
        for reader, (mutant, process, place, started) in list(running.items()):
            seconds = time.monotonic() - started
            if reader not in ready and seconds < limit:
                continue
            test, fault = None, f"took more than {limit:.0f} s"
            if reader in ready:
                try:
                    test, fault = reader.recv()
                except EOFError:
                    fault = "the process died"
            process.kill()
            process.join()
            del running[reader]
            output = (place / "log").read_text(encoding="utf-8", errors="replace")
            shutil.rmtree(place, ignore_errors=True)
            yield mutant, Verdict(test, fault, output, seconds)


def run_tests(mutant: Mutant | None, tests: list[str], place: Path, writer: Connection) -> None:
    """In a process of its own: sends the first test that fails, and why there may be no verdict.

    Args:
        mutant: What to break in the copy, if anything.
        tests: As in `judge`.
        place: Empty folder for the copy, the tests' own files and their output.
        writer: Where the two go.
    """
    output = os.open(place / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    source = place / "src"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        mutant.break_copy(source)
        first = mutant.first_test()
        tests = sorted(tests, key=lambda name: name != first)
    # Before the installed package, and so for what the tests run in processes of their own.
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    os.chdir(ROOT)
    try:
        imported = import_module("vanilla_transformer").__file__
    except Exception as error:
        return writer.send((None, f"cannot be imported: {error!r}"))
    if not Path(imported).is_relative_to(source):
        return writer.send((None, f"{imported} was imported, not the copy"))
    failure = FirstFailure()
    # Plain asserts: pytest can rewrite no plugin that is imported already.
    options = ["-x", "-q", "--assert=plain", "-m", "not slow", "-p", "no:cacheprovider"]
    options += [f"--basetemp={place / 'pytest'}"]
    status = pytest.main([*options, *map(path_of, tests)], plugins=[failure])
    is_clear = status == pytest.ExitCode.OK or failure.test is not None
    writer.send((failure.test, "" if is_clear else f"pytest ended with {status!r}"))
