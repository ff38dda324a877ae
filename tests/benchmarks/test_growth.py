"""`benchmarks/growth.py`: which run is in which column, and the corpora that it makes."""

import pytest

import growth
from growth import cells, measure


@pytest.fixture
def runs(monkeypatch):
    """Options of the runs, which take 1, 2, 3 ... seconds."""
    calls = []

    def run(argv, output, cache):
        calls.append((argv, output.name, cache.name))
        output.mkdir(exist_ok=True)
        seconds = float(len(calls))
        return {
            "seconds": seconds,
            "cpu": 10 * seconds,
            "peak": 3e9 * seconds,
            "unmapped": 2e9 * seconds,
            "checkpoint": seconds / 10,
        }

    monkeypatch.setattr(growth, "run", run)
    return calls


def test_second_run_has_the_cache_of_the_first_and_is_resumed(runs, tmp_path):
    measured = measure(20, tmp_path, is_streaming=False)

    row = ["20", "1.0 (10.0)", "3.00 (2.00)", "2.0 (20.0)", "3.0 (30.0)", "0.1"]
    assert list(cells(measured)) == row
    assert [(output, cache) for _, output, cache in runs] == [
        ("first-20", "cache-20"),
        ("again-20", "cache-20"),
        ("again-20", "cache-20"),
    ]
    assert ["--resume" in argv for argv, *_ in runs] == [False, False, True]
    assert not list(tmp_path.glob("train.*"))
