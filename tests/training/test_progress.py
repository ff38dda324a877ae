"""What a run reports: one bar on a terminal, one line elsewhere, and a log."""

import logging
import math
import re
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.reports import JsonLinesLog, Progress, read_log
from vanilla_transformer_tools.training.schedule import Schedule

from ..support.terminal import terminal
from ..support.training_runs import training_options

SCORES = {"eval_loss": 2.5, "eval_chrf": 40.0, "eval_bleu": 12.345, "eval_bleu_signature": "x"}


class Run:
    """A run without a model: 100 updates of 2 * 600 / 3 tokens, in a time of its own."""

    def __init__(self, monkeypatch, first=0, is_corpus=True, is_main=True, **arguments):
        self.seconds = 500.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)
        self.state = TrainerState(global_step=first, max_steps=100, epoch=0.0)
        self.state.is_world_process_zero = is_main
        defaults = {"disable_tqdm": False, "should_log": True, "gradient_accumulation_steps": 2}
        defaults |= {"metric_for_best_model": "bleu"}
        self.arguments = SimpleNamespace(**defaults | arguments)
        self.stop = Schedule(TrainSettings())
        self.stack = ExitStack()
        data = SimpleNamespace(tokens=600, batches=3, is_corpus=is_corpus)
        self.progress = Progress(data, self.stop, self.stack)
        self.tell("on_train_begin")

    def tell(self, event, **others):
        getattr(self.progress, event)(self.arguments, self.state, TrainerControl(), **others)

    def update(self, count, seconds):
        for _ in range(count):
            self.seconds += seconds / count
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / 40
            self.tell("on_step_end")

    def report(self, **logs):
        self.tell("on_log", logs={"loss": 3.14159, "learning_rate": 0.00321, **logs})

    def validate(self, seconds=0):
        for _ in range(3):
            self.seconds += seconds / 3
            self.tell("on_prediction_step", eval_dataloader=[0, 1, 2])
        self.tell("on_log", logs=SCORES)
        self.tell("on_evaluate", metrics=SCORES)


def test_report_is_one_line_with_speed_and_time_left(monkeypatch, capsys):
    run = Run(monkeypatch)

    run.update(10, seconds=20)
    run.report()
    run.update(10, seconds=40)
    run.report(loss=float("nan"))

    assert capsys.readouterr().out.splitlines() == [
        "step  10/100  epoch 0.25  loss 3.142  learning rate 3.21e-03  200 tokens/s  03:00 left",
        "step  20/100  epoch 0.50  loss nan  learning rate 3.21e-03  100 tokens/s  04:00 left",
    ]


def test_timed_run_ends_at_the_deadline_after_an_estimate_of_updates(monkeypatch, capsys):
    run = Run(monkeypatch)
    run.stop.seconds, run.stop.deadline = 600.0, 530.0

    for _ in range(2):
        run.update(10, seconds=20)
        run.report()

    printed = capsys.readouterr().out
    assert printed.startswith("step  10/~100  epoch")
    assert re.findall(r"(\S+) left", printed) == ["00:10", "00:00"]


def test_resumed_run_counts_its_own_updates_only(monkeypatch, capsys):
    run = Run(monkeypatch, first=80, is_corpus=False)

    run.update(10, seconds=20)
    run.report()
    run.arguments.should_log = False
    run.report()
    run.arguments.should_log = True
    run.tell("on_log", logs={"train_runtime": 75.0, "train_loss": 3.0})

    report, end = capsys.readouterr().out.splitlines()
    # A stream has no epochs.
    assert report.startswith("step  90/100  loss 3.142  learning rate")
    assert report.endswith("  200 tokens/s  00:20 left")
    assert end == "trained     10 updates in 01:15"


def test_evaluating_and_saving_count_for_the_time_left_but_not_for_the_speed(monkeypatch, capsys):
    run = Run(monkeypatch)

    run.update(5, seconds=10)
    run.validate(seconds=70)
    run.seconds += 10
    run.tell("on_save")
    run.update(5, seconds=10)
    run.report()

    validation, report = capsys.readouterr().out.splitlines()
    assert validation == "step   5/100  epoch 0.12  validation loss 2.500  bleu 12.35  chrf 40.00"
    assert report.endswith("  200 tokens/s  15:00 left")


@pytest.mark.parametrize("changes", [{"disable_tqdm": True}, {"is_main": False}])
def test_bar_is_shown_by_one_process_that_may(monkeypatch, changes):
    with terminal(monkeypatch) as screen:
        run = Run(monkeypatch, **changes)
        with run.stack:
            run.update(10, seconds=20)
            run.report()

    (line,) = screen.lines
    assert line.startswith("step  10/100  epoch 0.25  loss 3.142")


# Whole runs


def train(corpus, folder):
    """Two epochs by the command, whose bars are as by default."""
    validation = [corpus / f"validation.{language}" for language in ("de", "en")]
    options = [*training_options(corpus), "--validation", *validation, "--output_dir", folder]
    options += ["--disable_tqdm", "false", "--early_stopping_patience", "2"]
    options += ["--num_train_epochs", "2", "--logging_steps", "2", "--warmup_steps", "0"]
    options += ["--max_tokens_per_batch", "4000", "--max_validation_pairs", "4"]
    main(["train", *map(str, options)])


def test_run_in_a_pipe_prints_a_line_for_each_report(corpus, tmp_path, capfd, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    train(corpus, tmp_path / "run")

    out, err = capfd.readouterr()
    assert err == ""
    assert caplog.messages == []
    assert "\r" not in out
    lines = out[out.index("batches  ") :].splitlines()[1:]
    assert re.fullmatch(
        r"step \d+/(\d+)  epoch \d\.\d\d  loss \d\.\d{3}  learning rate \d\.\d\de-\d\d  "
        r"[\d,]+ tokens/s  \d\d:\d\d left",
        lines[0],
    )
    kinds = [line.split("  ")[2].split()[0] for line in lines if line.startswith("step ")]
    assert kinds.count("validation") == 2
    assert set(kinds) == {"loss", "validation"}
    others = [line.split()[0] for line in lines if not line.startswith("step ")]
    assert others == ["trained", "bleu", "The", "translate"]
    assert lines[-1].endswith(f" vanilla-transformer translate --model {tmp_path / 'run'} TEXT")


def test_run_on_a_terminal_has_one_bar(corpus, tmp_path, monkeypatch):
    with terminal(monkeypatch) as screen:
        train(corpus, tmp_path / "run")

    lines = screen.lines
    lines = lines[next(row for row, line in enumerate(lines) if line.startswith("batches")) + 1 :]
    first_words = [line.split()[0] for line in lines]
    assert first_words == ["step", "step", "trained", "bleu", "train", "The", "translate"]
    assert re.search(r"^train \|█+\| (\d+)/\1, 00:00 left, loss .*, bleu .* tokens/s$", lines[4])


# The log


def test_log_is_that_of_the_main_process_and_read_as_it_was(tmp_path):
    log = JsonLinesLog(tmp_path / "log.jsonl", first_update=0)
    logs = {"loss": float("nan"), "grad_norm": float("-inf"), "note": "nan?"}
    # Of no update.
    logs["train_loss"] = 3.0

    for is_main in (True, False):
        state = TrainerState(is_world_process_zero=is_main)
        log.on_log(SimpleNamespace(), state, TrainerControl(), logs=logs)

    (report,) = read_log(tmp_path / "log.jsonl")
    assert math.isnan(report["loss"])
    assert (report["grad_norm"], report["note"]) == (float("-inf"), "nan?")
    assert "train_loss" not in report


def test_log_of_a_resumed_run_keeps_its_reports_and_all_its_minutes(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    rows = [f'{{"step": {n}, "minutes": {n}.5}}\n' for n in (1, 2, 3)]
    # A kill cut the last row.
    path.write_text("".join([*rows, '{"step": 4, "min']))
    monkeypatch.setattr(time, "monotonic", lambda: 6000.0)

    log = JsonLinesLog(path, first_update=2)

    assert [report["step"] for report in read_log(path)] == [1, 2]
    monkeypatch.setattr(time, "monotonic", lambda: 6090.0)
    assert log.minutes == 5
    assert JsonLinesLog(path, first_update=0).minutes == 0
    assert not path.exists()
