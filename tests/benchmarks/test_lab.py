"""`benchmarks/lab.py`: what all benchmarks share."""

import runpy
import sys
from itertools import count

import pytest
import torch

from lab import Memory, Report, measure_alone, process_memory, ratio, speed_cells, take_turns

from ..support.documents import ROOT

# A median that is not the mean.
SLOW, FAST = [8.0, 4.0, 30.0], [2.0, 1.0, 3.0]
SCRIPTS = ("finetuning", "generation", "growth", "peers", "plot_complexity")
SCRIPTS += ("threads", "training", "tricks", "versions")


def test_contenders_take_turns_and_warm_ups_do_not_count():
    clock = count()
    contenders = {"a": lambda: next(clock), "b": lambda: next(clock)}

    assert take_turns(contenders, rounds=2, warm_ups=1) == {"a": [2, 4], "b": [3, 5]}


def test_ratio_is_of_medians_to_those_of_the_reference():
    assert ratio(SLOW, FAST) == "4.00"


def test_speed_is_that_of_the_median_round_and_larger_for_the_faster():
    assert speed_cells(16_000, SLOW, FAST) == ["2,000", "533-4,000", "0.25"]
    assert speed_cells(1, FAST, SLOW, decimals=1) == ["0.5", "0.3-1.0", "4.00"]


@pytest.mark.slow
def test_memory_is_that_of_a_call_in_a_process_of_its_own():
    ballast = b"1" * 200_000_000

    memory = measure_alone(eval, "len(b'1' * 80_000_000)")

    assert 78e6 < memory.growth < 100e6
    assert memory.growth < memory.peak < process_memory() - len(ballast) / 2
    assert memory.result == 80_000_000
    assert Memory(start=5, peak=7).growth == 2


def test_report_is_printed_and_written_with_hardware_and_versions(tmp_path, capsys):
    report = Report(tmp_path / "new" / "report.md")

    report.table("Seconds", "model", "s")
    report.row("ours", 2)

    text = (tmp_path / "new" / "report.md").read_text(encoding="utf-8")
    assert text == capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    assert text.endswith("\n\n| model | s |\n| --- | --- |\n| ours | 2 |\n")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_an_example(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])

    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")

    said = capsys.readouterr().out
    assert f"  python benchmarks/{script}.py " in said
    assert "--output OUTPUT" in said
