"""`benchmarks/rounds.py`, `memory.py` and `ratio_tables.py`: what all benchmarks share."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory import Memory, measure_alone, peak_memory
from ratio_tables import head, megabytes, rate, rate_range, ratio, row
from rounds import take_turns

from ..support.documents import ROOT

# A median that is not the mean.
SLOW, FAST = [8.0, 4.0, 30.0], [2.0, 1.0, 3.0]


def test_contenders_take_turns_and_warm_ups_do_not_count(capsys):
    clock = count()
    contenders = {"a": lambda: next(clock), "b": lambda: next(clock)}

    assert take_turns(contenders, rounds=2, warm_ups=1, where="here") == {"a": [2, 4], "b": [3, 5]}
    assert capsys.readouterr().err.splitlines()[1:] == [
        "here: round 1 of 2",
        "here: round 2 of 2",
    ]


def test_ratio_is_of_medians_to_those_of_the_reference():
    assert ratio(SLOW, FAST) == "4.00"
    assert ratio(FAST, SLOW) == "0.25"


def test_rates_are_those_of_the_median_and_of_the_slowest_and_fastest_round():
    assert rate(16_000, SLOW) == "2,000"
    assert rate(1, SLOW, decimals=3) == "0.125"
    assert rate_range(24_000, SLOW) == "800-6,000"


def test_rows_have_as_many_cells_as_their_header():
    assert head("model", "time") == "| model | time |\n| --- | --- |"
    assert row("ours", 2) == "| ours | 2 |"
    assert megabytes([2_000_000_000, 1_400_000]) == ["2,000", "1"]


def test_memory_is_that_of_a_call_in_a_process_of_its_own():
    ballast = b"1" * 200_000_000

    memory = measure_alone(exec, "held = b'1' * 80_000_000; del held")

    assert 78e6 < memory.growth < 100e6
    assert memory.growth < memory.peak < peak_memory() - len(ballast) / 2
    assert measure_alone(max, 3, 7).result == 7
    assert Memory(start=5, peak=7).growth == 2


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("generation.py", "default: 1 16 64"),
        ("plot_complexity.py", "Example:\n  python benchmarks/plot_complexity.py --"),
    ],
)
def test_help_answers_without_torch(tmp_path, script, shown):
    (tmp_path / "torch.py").write_text("raise ImportError", encoding="utf-8")

    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
