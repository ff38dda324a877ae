"""Breaks copies of the repository, one line each, and finds the test that notices.

Everything but this package is imported once, here. Each mutant is tested in a fork of this process,
which imports the broken copy of the package and first runs the test that caught it before.
"""

import gc
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# All others are packages below `src`.
FOLDERS_AT_THE_TOP = ("benchmarks", "checks", "examples", "scripts")
# Environments, caches and runs: nothing that a test reads.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs")

# In a folder of mutants: the test that caught each of those whose list names no single test.
RECORD = "caught_by.json"

# What the tests and the package import, where it is installed.
PRELOADED = (
    "ctranslate2",
    "evaluate",
    "matplotlib.figure",
    "onnxruntime",
    "pytest_timeout",
    "sacrebleu",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.onnx",
    "transformers.generation.utils",
    "transformers.models.m2m_100.modeling_m2m_100",
    "transformers.models.marian.modeling_marian",
    "transformers.trainer_seq2seq",
    "xdist.plugin",
)

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
    "modeling/decoding",
    "modeling/generation",
    "modeling/saving",
    "modeling/remote_code",
    "modeling/caches",
    "modeling/attention_backends",
    "modeling/packing",
    "modeling/cpu",
    "training/trainer",
    "modeling/ecosystem",
    "modeling/variant_grid",
    "modeling/talking_heads",
)


@dataclass(frozen=True)
class Mutant:
    """A defect of one line in one file.

    Args:
        name: What is wrong, in plain words.
        file: Its path below `src`, or from the top for `FOLDERS_AT_THE_TOP`.
        old: Text that occurs exactly once in the file.
        new: Its replacement.
        tests: Test files that notice it, by their places below `tests`, or single tests of them
            after `::`. By default the file that mirrors the broken one, and the oracle's for the
            model.
        caught_by: The test that caught it before, as pytest names it; empty if it is not recorded.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    caught_by: str = ""

    def path(self, root: Path) -> Path:
        """The file in the repository at `root`, or in a copy of it."""
        is_at_the_top = self.file.startswith(FOLDERS_AT_THE_TOP)
        return root / self.file if is_at_the_top else root / "src" / self.file

    def first_tests(self) -> tuple[str, ...]:
        """Its own tests."""
        package, *wing, name = Path(self.file).with_suffix("").parts
        if package in FOLDERS_AT_THE_TOP:
            wing = [package, *wing]
        if package.endswith("_cli"):
            wing = ["cli"]
        mirrored = "/".join([*wing, name.removesuffix("_vanilla_transformer")])
        return tuple(self.tests) or (mirrored.replace("modeling/modeling", "modeling/parity"),)

    def choose_tests(self) -> list[list[str]]:
        """Runs of pytest, one after the other until a test fails.

        They are the test that caught it before, its own tests, and for a Hub file all that are
        about the model.
        """
        first, rest = list(self.first_tests()), []
        if self.file.endswith("_vanilla_transformer.py"):
            rest = [name for name in TESTS if name not in first]
            first = [*filter(exists, first)]
        runs = [[self.caught_by], [*map(path_of, first)], [*map(path_of, rest)]]
        return [tests for tests in runs if any(tests)]

    def needs_record(self) -> bool:
        """Whether its entry names anything but a single test."""
        return len(self.tests) != 1 or "::" not in self.tests[0]

    def break_copy(self, root: Path) -> None:
        """Writes the defect into the copy of the repository at `root`."""
        text = self.path(root).read_text(encoding="utf-8")
        self.path(root).write_text(text.replace(self.old, self.new), encoding="utf-8")


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

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """In each file, runs every test with one of its parameters before any with the next."""
        files = list(dict.fromkeys(item.path for item in items))
        seen: Counter[str] = Counter()
        order = []
        for place, item in enumerate(items):
            test = item.nodeid.partition("[")[0]
            order.append((files.index(item.path), seen[test], place))
            seen[test] += 1
        items[:] = [items[place] for *_, place in sorted(order)]

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


def load_mutants(folder: Path) -> list[Mutant]:
    """Reads the TOML files of a folder, one for each wing, in the order of their names.

    Each has a list of tables for each broken file. No defect is equivalent: a result, a gradient, a
    saved file, an error or the memory of a step comes out wrong.

    Raises:
        ValueError: If an old text does not occur exactly once in its file.
    """
    record = folder / RECORD
    caught_by = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    mutants = [
        Mutant(file=file, caught_by=caught_by.get(fields["name"], ""), **fields)
        for path in sorted(folder.glob("*.toml"))
        for file, rows in tomllib.loads(path.read_text(encoding="utf-8")).items()
        for fields in rows
    ]
    texts = {mutant.file: mutant.path(ROOT).read_text(encoding="utf-8") for mutant in mutants}
    counts = {mutant.name: texts[mutant.file].count(mutant.old) for mutant in mutants}
    stale = [f"{name}: {count} times" for name, count in counts.items() if count != 1]
    if stale:
        raise ValueError(
            f"Each `old` in {folder} must occur once in its file; bring these up to date:\n"
            + "\n".join(stale)
        )
    return mutants


def record_tests(folder: Path, mutants: Iterable[Mutant], tests: dict[str, str]) -> None:
    """Records which test caught each mutant; what is known of those not tried stays.

    Args:
        folder: Of the lists.
        mutants: All in the lists; others are forgotten.
        tests: What caught those that were tried, by their names.
    """
    known = {
        mutant.name: tests.get(mutant.name, mutant.caught_by)
        for mutant in mutants
        if mutant.needs_record()
    }
    rows = {name: known[name] for name in sorted(known) if known[name]}
    text = json.dumps(rows, indent=0, ensure_ascii=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def path_of(name: str) -> str:
    """What pytest calls a test file, or a test in it, from its place below `tests`."""
    place, colons, test = name.partition("::")
    folder, _, stem = place.rpartition("/")
    return str(Path("tests", folder, f"test_{stem}.py")) + colons + test


def exists(name: str) -> bool:
    """Whether there is a test file of that name."""
    return (ROOT / path_of(name.partition("::")[0])).exists()


def take_share(mutants: list[Mutant], share: str) -> list[Mutant]:
    """Every n-th mutant, beginning with the i-th.

    Args:
        mutants: All.
        share: "i/n", with i from 1 to n.

    Raises:
        ValueError: If the share is none.
    """
    first, _, step = share.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise ValueError(f"--share takes I/N with 1 <= I <= N, such as 2/6, got {share!r}.")
    return mutants[int(first) - 1 :: int(step)]


def judge(
    trials: list[tuple[Mutant | None, list[list[str]]]], folder: Path, jobs: int, limit: float
) -> Iterator[tuple[Mutant | None, Verdict]]:
    """Runs tests on each mutant; yields in the order in which they finish.

    Args:
        trials: Mutants, each with its runs of pytest; None stands for the repository as it is.
        folder: Where the copies go.
        jobs: Processes at the same time.
        limit: Seconds after which a process is ended.
    """
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    # pytest collects garbage often; what the forks share is none.
    gc.collect()
    gc.freeze()
    context = get_context("fork")
    waiting, running = list(trials), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, runs = waiting.pop(0)
            place = Path(tempfile.mkdtemp(dir=folder))
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=run_tests, args=(mutant, runs, place, writer))
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


def run_tests(
    mutant: Mutant | None, runs: list[list[str]], place: Path, writer: Connection
) -> None:
    """In a process of its own: sends the first test that fails, and why there may be no verdict.

    Args:
        mutant: What to break in the copy, if anything.
        runs: Tests as pytest names them; a run begins if the ones before it have passed.
        place: Empty folder for the copy, the tests' own files and their output.
        writer: Where the two go.
    """
    output = os.open(place / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    root = place / "copy"
    shutil.copytree(ROOT, root, symlinks=True, ignore=LEFT_OUT)
    if mutant is not None:
        mutant.break_copy(root)
    source = root / "src"
    # Before the installed package, and so for what the tests run in processes of their own.
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    os.chdir(root)
    # Its tests import the copy of this module, too.
    sys.modules.pop("mutation", None)
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
    for tests in runs:
        status = pytest.main([*options, *tests], plugins=[failure])
        if failure.test is not None:
            break
    is_clear = status == pytest.ExitCode.OK or failure.test is not None
    writer.send((failure.test, "" if is_clear else f"pytest ended with {status!r}"))
