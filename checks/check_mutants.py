#!/usr/bin/env python
"""Breaks the repository in one place at a time and reports which test notices.

Everything but the packages of this repository is imported once, here. Each mutant is tested in a
fork of this process, which imports a broken copy and first runs the test that caught it before.
"""

import argparse
import ast
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import accumulate, groupby
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "tests" / "mutants"
# A generated file in the folder of mutants: the test that caught each of them last time.
RECORD = "caught_by.json"
# Its cases are other ones with each new choice; the record names the test without its case.
DRAWN_ANEW = "test_variant_grid"
# Environments, caches and runs: nothing that a test reads.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs")

# What the tests and the packages import, where it is installed.
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


class Place(NamedTuple):
    """The definition of a function, a class or a constant.

    Attributes:
        path: File, relative to the repository.
        text: All text of the file.
        start: Index of the definition's first character in the text.
        end: Index after its last character.
    """

    path: Path
    text: str
    start: int
    end: int


class Mutant(NamedTuple):
    """A defect in one place.

    Attributes:
        name: What is wrong, in plain words.
        where: Qualified name of the function, class or constant that is broken, such as
            `Attention.forward`; `attention:Attention.forward` where several files have that name.
        old: Code that occurs exactly once there. Indentation does not count.
        new: Its replacement. Lines after the first are indented relative to it.
        tests: Stems of the test files that notice it.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]

    def matches(self, places: dict[str, list[Place]]) -> list[tuple[Place, re.Match[str]]]:
        """Each occurrence of the old code; `places` is from `find_places`."""
        lines = (re.escape(line.strip()) for line in self.old.split("\n"))
        pattern = re.compile(r"\n *".join(lines))
        return [
            (place, match)
            for place in places.get(self.where, ())
            for match in pattern.finditer(place.text, place.start, place.end)
        ]

    def broken(self, places: dict[str, list[Place]]) -> tuple[Path, str]:
        """The file that is broken, relative to the repository, and all of its new text."""
        [(place, match)] = self.matches(places)
        before, after = place.text[: match.start()], place.text[match.end() :]
        indentation = re.match(" *", before[before.rfind("\n") + 1 :] + "x")[0]
        return place.path, before + self.new.replace("\n", f"\n{indentation}") + after


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
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

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Looks at a test, its fixtures included, or at a test file."""
        if report.failed and self.test is None:
            self.test = report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def find_places(root: Path) -> dict[str, list[Place]]:
    """All functions, classes and constants below `src`, by their qualified names.

    Each stands there a second time with the stem of its file and a colon before its name.
    """
    places = defaultdict(list)
    for path in sorted((root / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
        for name, first, last in _definitions(ast.parse(text).body):
            place = Place(path.relative_to(root), text, starts[first - 1], starts[last])
            places[name].append(place)
            places[f"{path.stem}:{name}"].append(place)
    return dict(places)


def _definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Qualified name, first and last line, from 1, of each definition."""
    for node in body:
        first, last = node.lineno, node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, first, last
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            yield ast.unparse(target), first, last


def load_mutants(folder: Path, places: dict[str, list[Place]]) -> list[Mutant]:
    """Reads the lists of a folder, which CONTRIBUTING.md describes, in the order of their names.

    Raises:
        ValueError: If the old code of a mutant does not occur exactly once in its place.
    """
    mutants = []
    for path in sorted(folder.glob("*.diff")):
        mutants += read_mutants(path.read_text(encoding="utf-8"))
    counts = [(len(mutant.matches(places)), mutant) for mutant in mutants]
    stale = [
        f"{mutant.name}: {count} times in {mutant.where}: {mutant.old}"
        for count, mutant in counts
        if count != 1
    ]
    if stale:
        raise ValueError(
            f"The old code of each mutant in {folder} must occur once in the place that it names. "
            "Quote there what your change made of it, or delete the mutant if its code is gone:\n"
            + "\n".join(stale)
        )
    return mutants


def read_mutants(text: str) -> Iterator[Mutant]:
    """Reads a list: a header with place and tests, then names, each with its old and new code."""
    where, tests, name = "", (), ""
    code: dict[str, list[str]] = {"-": [], "+": []}
    # The empty name at the end completes the last mutant.
    for line in [*text.splitlines(), "@@ @@"]:
        sign, content = line.partition(" ")[0], line[2:]
        if sign in code:
            code[sign].append(content)
        elif line and sign != "#":
            if code["-"]:
                yield Mutant(name, where, "\n".join(code["-"]), "\n".join(code["+"]), tests)
                code = {"-": [], "+": []}
            if line.startswith("@@"):
                where, _, names = map(str.strip, line[2:].partition("@@"))
                tests = tuple(names.split())
            else:
                name = line


def load_record(folder: Path) -> dict[str, str]:
    """The test that caught each mutant, such as `test_loss::test_sum[1]`, by the mutant's name."""
    record = folder / RECORD
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def save_record(folder: Path, mutants: Iterable[Mutant], caught: dict[str, str]) -> None:
    """Records which tests caught mutants, as pytest names them; forgets mutants that are gone."""
    known = load_record(folder)
    for name, test in caught.items():
        path, colons, case = test.partition("::")
        if Path(path).stem == DRAWN_ANEW:
            case = case.partition("[")[0]
        known[name] = Path(path).stem + colons + case
    names = sorted({mutant.name for mutant in mutants} & known.keys())
    text = json.dumps({name: known[name] for name in names}, indent=0, ensure_ascii=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def find_tests(name: str) -> list[str]:
    """What pytest calls the test files of that stem, or one test in them named after `::`."""
    stem, colons, case = name.partition("::")
    paths = sorted((ROOT / "tests").rglob(f"{stem}.py"))
    return [str(path.relative_to(ROOT)) + colons + case for path in paths]


def choose_tests(mutant: Mutant, record: dict[str, str]) -> list[list[str]]:
    """Runs of pytest until one fails: the test that caught the mutant before, then its files."""
    files = [path for name in mutant.tests for path in find_tests(name)]
    known = find_tests(record.get(mutant.name, ""))
    return [[test] for test in known] + [files]


def take_share(mutants: list[Mutant], share: str) -> list[Mutant]:
    """Every n-th mutant, beginning with the i-th, for a share "i/n"."""
    first, _, step = share.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        raise ValueError(f"--share takes I/N with 1 <= I <= N, such as 2/6, got {share!r}.")
    return mutants[int(first) - 1 :: int(step)]


# A file of the repository and its broken text; None stands for the repository as it is.
Break = tuple[Path, str] | None


def judge(
    trials: dict[str, tuple[Break, list[list[str]]]], folder: Path, jobs: int, limit: float
) -> Iterator[tuple[str, Verdict]]:
    """Runs tests on each mutant; yields names in the order in which they finish.

    `trials` has, by name, what to break and the runs of pytest; a process is ended after `limit`
    seconds.
    """
    for module in PRELOADED:
        with suppress(ImportError):
            import_module(module)
    # pytest collects garbage often; what the forks share is none.
    gc.collect()
    gc.freeze()
    context = get_context("fork")
    waiting, running = list(trials.items()), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, (broken, runs) = waiting.pop(0)
            place = Path(tempfile.mkdtemp(dir=folder))
            process = context.Process(target=run_tests, args=(broken, runs, place))
            process.start()
            running[process.sentinel] = name, process, place, time.monotonic()
        ended = wait(running, timeout=1)
        for sentinel, (name, process, place, started) in list(running.items()):
            seconds = time.monotonic() - started
            if sentinel in ended or seconds > limit:
                process.kill()
                process.join()
                del running[sentinel]
                test, fault = None, "the process died, or took too long"
                if (place / "verdict").exists():
                    test, fault = json.loads((place / "verdict").read_text(encoding="utf-8"))
                output = (place / "log").read_text(encoding="utf-8", errors="replace")
                shutil.rmtree(place, ignore_errors=True)
                yield name, Verdict(test, fault, output, seconds)


def run_tests(broken: Break, runs: list[list[str]], place: Path) -> None:
    """In a process of its own: tests a copy of the repository in the empty folder `place`.

    It writes the first test that fails, and why there may be no verdict. A run begins if the ones
    before it have passed.
    """
    output = os.open(place / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    root = place / "copy"
    shutil.copytree(ROOT, root, symlinks=True, ignore=LEFT_OUT)
    if broken is not None:
        path, text = broken
        (root / path).write_text(text, encoding="utf-8")
    source = root / "src"
    # Before the installed package, and so for what the tests run in processes of their own.
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    os.chdir(root)
    # Plain asserts: pytest can rewrite no plugin that is imported already.
    options = ["-x", "-q", "--assert=plain", "-m", "not slow", "-p", "no:cacheprovider"]
    options += [f"--basetemp={place / 'pytest'}"]
    failure, fault = FirstFailure(), ""
    try:
        imported = import_module("vanilla_transformer").__file__
        if not Path(imported).is_relative_to(source):
            runs, fault = [], f"{imported} was imported, not the copy"
    except Exception as error:
        runs, fault = [], f"cannot be imported: {error!r}"
    for tests in runs:
        if failure.test is None:
            status = pytest.main([*options, *tests], plugins=[failure])
            fault = f"pytest ended with {status!r}" if status != pytest.ExitCode.OK else ""
    verdict = [failure.test, "" if failure.test else fault]
    (place / "verdict").write_text(json.dumps(verdict), encoding="utf-8")
    sys.stdout.flush()
    # Threads that a test has left are not waited for.
    os._exit(0)


def main() -> int:
    """Prints a Markdown table; the status is 1 unless a test caught every mutant."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: python checks/check_mutants.py --jobs 2 > mutants.md",
    )
    only = {"action": "append", "default": [], "metavar": "WORDS"}
    parser.add_argument("--only", **only, help="Those whose name contains these words; repeatable.")
    share = "Every N-th of them, beginning with the I-th."
    parser.add_argument("--share", metavar="I/N", default="1/1", help=share)
    unbroken = "Do not check that the tests that caught a mutant pass on what is not broken."
    parser.add_argument("--skip-unbroken", action="store_true", help=unbroken)
    record = "Write which test caught each mutant to caught_by.json; it is run first next time."
    parser.add_argument("--record", action="store_true", help=record)
    parser.add_argument("--jobs", type=int, default=2, help="Processes at once (default: 2).")
    parser.add_argument("--limit", type=float, default=600, help="Seconds for each (default: 600).")
    arguments = parser.parse_args()
    # One thread for each process, and no Hub; read when the libraries are imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    places = find_places(ROOT)
    try:
        every = load_mutants(MUTANTS, places)
        share = take_share(every, arguments.share)
    except ValueError as error:
        sys.exit(str(error))
    for words in arguments.only:
        if not any(words in mutant.name for mutant in share):
            sys.exit(f"--only {words!r} is in no name of share {arguments.share}.")
    wanted = arguments.only or [""]
    mutants = [mutant for mutant in share if any(words in mutant.name for words in wanted)]
    print(f"{len(mutants)} mutants; the first takes half a minute.", file=sys.stderr)
    record = load_record(MUTANTS)
    trials = {one.name: (one.broken(places), choose_tests(one, record)) for one in mutants}
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder), arguments.jobs, arguments.limit
        for name, verdict in judge(trials, *settings):
            verdicts[name] = verdict
            result = verdict.test or verdict.fault or "SURVIVED"
            count = f"{len(verdicts)}/{len(mutants)}"
            print(f"{count} {name} -> {result}, {verdict.seconds:.1f} s", file=sys.stderr)
        caught = {name: verdict.test for name, verdict in verdicts.items() if verdict.test}
        if not arguments.skip_unbroken:
            files = groupby(sorted({*caught.values()}), lambda test: test.partition("::")[0])
            for _, verdict in judge({path: (None, [[*tests]]) for path, tests in files}, *settings):
                if verdict.test or verdict.fault:
                    sys.exit(f"{verdict.output}\nThe tests must pass if nothing is broken.")
    if arguments.record:
        save_record(MUTANTS, every, caught)

    print("| place | defect | caught by |\n| --- | --- | --- |")
    # What no test caught stands last, where a long log still has it.
    for mutant in sorted(mutants, key=lambda mutant: mutant.name in caught, reverse=True):
        verdict = verdicts[mutant.name]
        result = f"`{verdict.test.removeprefix('tests/')}`" if verdict.test else "**SURVIVED**"
        print(f"| {mutant.where} | {mutant.name} | {verdict.fault or result} |")
    print(f"\n{len(caught)} of {len(mutants)} caught (share {arguments.share}).")
    return len(caught) < len(mutants)


if __name__ == "__main__":
    sys.exit(main())
