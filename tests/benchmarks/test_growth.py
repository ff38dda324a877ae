"""`benchmarks/growth.py`: which run is in which column, and the corpora that it makes."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import growth
from growth import cells, made_lines, measure


@pytest.fixture
def runs(monkeypatch):
    """Options of the runs, which take 1, 2, 3 ... seconds."""
    calls = []

    def run(argv, output, cache):
        calls.append((argv, output.name, cache.name))
        output.mkdir(exist_ok=True)
        seconds = float(len(calls))
        report = {"seconds": seconds, "peak": 3e9, "unmapped": 2e9, "checkpoint": seconds / 10}
        return report

    monkeypatch.setattr(growth, "run", run)
    return calls


def options_of(**changes):
    return argparse.Namespace(**{"preset": "tiny", "vocab_size": 300, "learn": False} | changes)


def test_second_run_has_cache_and_vocabulary_of_the_first_and_is_resumed(runs, tmp_path):
    measured = measure(20, tmp_path, options_of())

    assert list(cells(measured)) == ["20", "2.0", "3,000 (2,000)", "3.0", "4.0", "0.2"]
    assert [(output, cache) for _, output, cache in runs] == [
        ("vocabulary", "unused"),
        ("first-20", "cache"),
        ("again-20", "cache"),
        ("again-20", "cache"),
    ]
    assert ["--resume" in argv for argv, *_ in runs] == [False, False, False, True]
    assert ["--tokenizer" in argv for argv, *_ in runs] == [False, True, True, True]
    assert not list(tmp_path.glob("train.*"))


def test_vocabulary_is_learned_once_for_all_sizes_unless_for_each(runs, tmp_path):
    for pairs in (10, 20):
        measure(pairs, tmp_path, options_of())
    assert sum("--vocab_size" in argv for argv, *_ in runs) == 1

    runs.clear()
    measure(30, tmp_path, options_of(learn=True))
    assert ["--vocab_size" in argv for argv, *_ in runs] == [True, False, False]
    assert runs[1][0][-4:-2] == ["--tokenizer", str(tmp_path / "first-30")]


def test_made_lines_have_27_words_on_average_and_are_the_same_each_time():
    lines = list(made_lines(20_010, seed=0))

    counts = [len(line.split(" ")) for line in lines]
    assert len(lines) == 20_010
    assert sum(counts) / len(counts) == pytest.approx(27, abs=0.5)
    assert lines == list(made_lines(20_010, seed=0))
    assert lines[:5] != list(made_lines(5, seed=1))
    assert all(line.endswith("\n") and line.strip() for line in lines)
