"""A Parquet corpus in two processes, one of which is killed: the lines of a single one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from number_words import german
from vanilla_transformer_tools.translation import Translator

from ..support.documents import ROOT

PARTS, ROWS_OF_A_PART = 4, 300
IDS = [f"{number:04}" for number in range(PARTS * ROWS_OF_A_PART)]
LINES = [german(number) for number in range(len(IDS))]
# Each process imports torch, and all share the cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def needs(package):
    return pytest.mark.skipif(
        not find_spec(package), reason="needs the extra scale: pip install -e '.[scale]'"
    )


@pytest.fixture
def words(place, tmp_path) -> list[str]:
    """Options of both scripts; the corpus has as many files as there are parts."""
    (tmp_path / "corpus").mkdir()
    for part in range(PARTS):
        rows = slice(part * ROWS_OF_A_PART, (part + 1) * ROWS_OF_A_PART)
        table = pa.table({"id": IDS[rows], "line": LINES[rows]})
        pq.write_table(table, tmp_path / "corpus" / f"{part}.parquet")
    options = {"model": place / "model", "input": tmp_path / "corpus", "column": "line"}
    options |= {"output": tmp_path / "out", "workers": 2}
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


@contextmanager
def started(script: str, *words: object) -> Iterator[subprocess.Popen]:
    """A script in a session of its own, which ends with all its processes."""
    command = [sys.executable, ROOT / "examples/scale" / script, *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_one(script: subprocess.Popen, is_at_work: Callable[[psutil.Process], bool]) -> None:
    """Kills the first process of a script that is found at work."""
    while script.poll() is None:
        for child in psutil.Process(script.pid).children(recursive=True):
            try:
                if is_at_work(child):
                    os.kill(child.pid, signal.SIGKILL)
                    return
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.01)
    raise AssertionError("The script ended before one of its workers was found.")


def assert_whole(folder: Path, place: Path) -> None:
    # Ray writes an actor's batches as they come.
    table = pq.read_table(folder, columns=["id", "translation"])
    rows = table.sort_by("id").to_pylist()
    expected = Translator.from_pretrained(str(place / "model")).translate(LINES)
    assert [row["id"] for row in rows] == IDS
    assert [row["translation"] for row in rows] == [one.text for one in expected]


@needs("ray")
def test_ray_translates_all_lines_though_an_actor_is_killed(words, place, tmp_path):
    with started("with_ray.py", *words, "--batch_size", ROWS_OF_A_PART) as script:
        # Ray names a process after what it does.
        kill_one(script, lambda one: "(TranslateColumn)).submit" in " ".join(one.cmdline()))
        assert script.wait() == 0

    assert_whole(tmp_path / "out", place)


@needs("datatrove")
def test_datatrove_repeats_the_task_of_a_killed_worker(words, place, tmp_path):
    logs = tmp_path / "logs"
    words += ["--logs", logs, "--tasks", PARTS]

    def done() -> list[str]:
        return sorted(file.name for file in logs.glob("completions/*"))

    with started("with_datatrove.py", *words) as script:
        kill_one(script, lambda one: any("logs/task_" in file.path for file in one.open_files()))
        # datatrove waits for the lost task.
        while len(done()) < PARTS - 1:
            assert script.poll() is None
            time.sleep(0.1)
    before = done()
    with started("with_datatrove.py", *words) as script:
        assert script.wait() == 0

    assert len(before) == PARTS - 1
    assert len(done()) == PARTS
    assert_whole(tmp_path / "out", place)
