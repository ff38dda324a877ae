"""`benchmarks/pipeline.py`: minutes of training to a common loss."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pipeline_contenders
from pipeline import table
from pipeline_contenders import Clock, minutes_to


def test_table_has_the_minutes_to_the_loss_that_all_reach():
    runs = {
        "fast": [(1.0, 4.0), (2.0, 2.0), (3.0, 2.5)],
        "slow": [(1.5, 5.0), (4.0, 3.0)],
    }

    header, _, fast, slow = table(runs).splitlines()

    assert header == "| model | minutes to a validation loss of 3.000 | loss at the end |"
    assert fast == "| fast | 1.50 | 2.500 |"
    assert slow == "| slow | 4.00 | 3.000 |"


def test_minutes_are_interpolated_after_the_first_evaluation_only():
    run = [(2.0, 4.0), (4.0, 3.0), (6.0, 1.0)]

    assert minutes_to(5.0, run) == 2.0
    assert minutes_to(2.5, run) == pytest.approx(4.5)


def test_clock_counts_minutes_of_training_without_evaluations(monkeypatch):
    now = 0.0
    monkeypatch.setattr(pipeline_contenders.time, "perf_counter", lambda: now)
    clock, evaluated = Clock(minutes=2, evaluations=2), []
    for _ in range(5):
        control = SimpleNamespace(should_evaluate=False, should_training_stop=False)
        clock.on_step_begin(None, None, control)
        now += 30
        clock.on_step_end(None, None, control)
        evaluated.append(control.should_evaluate)
        if control.should_evaluate:
            now += 1000
            clock.on_evaluate(None, None, control, metrics={"eval_loss": now})
        if control.should_training_stop:
            break

    assert evaluated == [False, True, False, True]
    assert clock.losses == [(1.0, 1060.0), (2.0, 2120.0)]
