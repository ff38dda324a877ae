"""What a run reports while it goes on."""

import json

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from vanilla_transformer.training import run_record
from vanilla_transformer.training.run_record import JsonLinesLog


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log whose clock a test turns: `log(seconds, event)` lets so much time pass first."""
    clock = [1000.0]
    monkeypatch.setattr(run_record.time, "monotonic", lambda: clock[0])
    callback = JsonLinesLog(tmp_path / "log.jsonl", goes_on=False)
    given = TrainingArguments(use_cpu=True), TrainerState(), TrainerControl()

    def pass_time(seconds, event, **options):
        clock[0] += seconds
        getattr(callback, event)(*given, **options)

    return pass_time


@pytest.fixture
def reports(tmp_path):
    def read():
        lines = (tmp_path / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return read


def test_share_of_time_outside_of_updates_is_told(log, reports):
    log(50, "on_step_begin")  # what comes before the first update is no part of it
    log(6, "on_optimizer_step")
    log(3, "on_step_begin")
    log(10, "on_optimizer_step")
    log(1, "on_log", logs={"loss": 2.0})
    log(1, "on_step_begin")
    log(4, "on_optimizer_step")
    log(0, "on_log", logs={"loss": 1.0})

    assert [report["outside_step"] for report in reports()] == [4 / 20, 1 / 5]


def test_evaluation_is_no_part_of_the_time_outside_of_updates(log, reports):
    log(0, "on_step_begin")
    log(4, "on_optimizer_step")
    log(0, "on_log", logs={"loss": 2.0})
    log(500, "on_log", logs={"eval_loss": 2.0})
    log(1, "on_step_begin")
    log(3, "on_optimizer_step")
    log(0, "on_log", logs={"loss": 1.0})

    assert [report.get("outside_step") for report in reports()] == [0, None, 1 / 4]
