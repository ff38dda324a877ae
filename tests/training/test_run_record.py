"""What a run needs to be repeated, and what it reports while it goes on."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from transformers import Seq2SeqTrainingArguments, TrainerControl, TrainerState, TrainingArguments

from vanilla_transformer_tools.files import checksum
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.privacy import find_disclosures
from vanilla_transformer_tools.training import plan, reports
from vanilla_transformer_tools.training.plan import describe_run
from vanilla_transformer_tools.training.reports import JsonLinesLog, plot_curves, read_log


def drawn_points(picture):
    """Points of each line of the picture, as they are in its file; ticks and frames left out."""
    paths = re.findall(r'<path d="([^"]*)" clip-path[^>]*stroke-linecap: square', picture)
    return [
        [tuple(map(float, point)) for point in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)]
        for path in paths
    ]


def test_curves_show_losses_score_and_learning_rate(tmp_path):
    rows = [
        {"minutes": 0.5, "loss": 5.0, "learning_rate": 0.001},
        {"minutes": 1.0, "loss": 3.0, "learning_rate": 0.002},
        {"minutes": 1.1, "eval_loss": 4.0, "eval_bleu": 10.0},
        {"minutes": 1.5, "loss": 2.0, "learning_rate": 0.001},
        {"minutes": 2.1, "eval_loss": 3.0, "eval_bleu": 20.0},
    ]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))

    path = plot_curves(tmp_path, "bleu")

    assert path == tmp_path / "curves.svg"
    loss, validation, bleu, rate = drawn_points(path.read_text())
    assert [len(curve) for curve in (loss, validation, bleu, rate)] == [3, 2, 2, 3]
    # The y axis of the picture points downwards.
    assert loss[0][1] < loss[1][1] < loss[2][1]
    assert bleu[1][1] < bleu[0][1]


TOKEN = "hf_" + "aB3" * 11


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log whose clock a test turns: `log(seconds, event)` lets so much time pass first."""
    clock = [1000.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: clock[0])
    callback = JsonLinesLog(tmp_path / "log.jsonl", first_update=0)
    given = TrainingArguments(use_cpu=True), TrainerState(), TrainerControl()

    def pass_time(seconds, event, *, state=given[1], **options):
        clock[0] += seconds
        getattr(callback, event)(given[0], state, given[2], **options)

    return pass_time


def test_share_of_time_outside_of_updates_is_told_by_the_main_process(log, tmp_path):
    log(50, "on_step_begin")  # what comes before the first update is no part of it
    log(6, "on_optimizer_step")
    log(3, "on_step_begin")
    log(10, "on_optimizer_step")
    log(1, "on_log", logs={"loss": 2.0})
    log(1, "on_step_begin")
    log(4, "on_optimizer_step")
    log(0, "on_log", logs={"loss": 1.0})
    log(1, "on_log", state=TrainerState(is_world_process_zero=False), logs={"loss": 1.0})

    rows = read_log(tmp_path / "log.jsonl")
    assert [report["outside_step"] for report in rows] == [4 / 20, 1 / 5]


def test_numbers_that_are_not_finite_are_read_as_they_were(log, tmp_path):
    log(0, "on_log", logs={"loss": float("nan"), "grad_norm": float("-inf"), "note": "nan?"})

    (report,) = read_log(tmp_path / "log.jsonl")
    assert math.isnan(report["loss"])
    assert (report["grad_norm"], report["note"]) == (float("-inf"), "nan?")


def test_log_of_a_resumed_run_keeps_its_reports_and_all_its_minutes(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    rows = [f'{{"step": {n}, "minutes": {n}.5}}\n' for n in (1, 2, 3)]
    # A kill cut the last row.
    path.write_text("".join([*rows, '{"step": 4, "min']))
    monkeypatch.setattr(reports.time, "monotonic", lambda: 6000.0)

    log = JsonLinesLog(path, first_update=2)

    assert [report["step"] for report in read_log(path)] == [1, 2]
    monkeypatch.setattr(reports.time, "monotonic", lambda: 6090.0)
    assert log.minutes == 5
    assert JsonLinesLog(path, first_update=0).minutes == 0
    assert not path.exists()


# What a run is made from


def test_commit_says_whether_the_tree_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "plan.py"))
    assert plan._commit() is None
    (tmp_path / "plan.py").write_text("1")
    given = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*given, *words], check=True)

    clean = plan._commit()
    (tmp_path / "plan.py").write_text("2")

    assert clean
    assert plan._commit() == f"{clean}-dirty"
    # A wheel in an environment inside of somebody's repository.
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "installed.py"))
    (tmp_path / "installed.py").write_text("1")
    assert plan._commit() is None


@pytest.fixture
def pairs(tmp_path):
    """Two files each to train and validate on, with the same names in two folders."""
    folders = tmp_path / "home" / "jo", tmp_path / "validation"
    for folder in folders:
        folder.mkdir(parents=True)
        for language in ("de", "en"):
            (folder / f"text.{language}").write_text(f"{folder.name} {language}\n")
    return [[str(folder / f"text.{language}") for language in ("de", "en")] for folder in folders]


@pytest.fixture
def describe(tmp_path):
    def describe_settings(**settings):
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path / "runs" / "de-en"), use_cpu=True, hub_token=TOKEN, hub_model_id="me/model"
        )
        return describe_run(TrainSettings(**settings), arguments, 5)

    return describe_settings


def test_record_holds_neither_the_token_nor_a_path_of_the_machine(
    describe, pairs, tmp_path, monkeypatch
):
    train, validation = pairs
    monkeypatch.setenv("HF_TOKEN", "hf_short8")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--train", *train, "--hub_token", TOKEN, "--run_name=hf_short8"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "vanilla-transformer"), *words])

    record = describe(train=train, validation=validation, init_from=str(tmp_path / "base"))

    text = json.dumps(record, indent=2)
    assert TOKEN not in text
    assert str(tmp_path) not in text
    assert find_disclosures(text) == []
    assert record["command"] == [
        *("vanilla-transformer", "--train", "text.de", "text.en"),
        *("--hub_token", "<secret>", "--run_name=<secret>"),
    ]
    assert record["settings"]["init_from"] == "base"
    assert record["arguments"]["output_dir"] == "de-en"
    assert record["arguments"]["hub_model_id"] == "me/model"
    assert record["first_update"] == 5


def test_record_tells_files_of_one_name_apart_by_their_checksums(describe, pairs):
    train, validation = pairs

    record = describe(train=train, validation=validation, filter_overlap=train[:1])

    assert record["sha256"] == {
        "text.de": checksum(train[0]),
        "text.en": checksum(train[1]),
        "text.de (2)": checksum(validation[0]),
        "text.en (2)": checksum(validation[1]),
    }
    assert record["settings"]["train"] == ["text.de", "text.en"]
    assert record["settings"]["validation"] == ["text.de (2)", "text.en (2)"]
    assert record["settings"]["filter_overlap"] == ["text.de"]


@pytest.mark.parametrize("setting", ["train", "init_from"])
def test_record_tells_folders_apart_by_what_they_hold(describe, tmp_path, setting):
    folder = tmp_path / "pairs"
    (folder / "split").mkdir(parents=True)
    (folder / "split" / "part.safetensors").touch()
    weights = folder / "model.safetensors"
    weights.touch()

    def checksum_with(text, name="model.safetensors"):
        weights.rename(folder / name).write_text(text)
        path = str(folder)
        return describe(**{setting: [path] if setting == "train" else path})["sha256"]["pairs"]

    first = checksum_with("one")
    assert len(first) == 64
    assert checksum_with("two") != first
    # Files that `datasets` leaves there, and the card of a model, are nothing to learn from.
    (folder / ("cache-1.arrow" if setting == "train" else "README.md")).touch()
    assert checksum_with("one") == first
    assert checksum_with("one", name="other.safetensors") != first


def test_hardware_is_what_the_run_computes_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")

    assert plan.hardware(torch.device("cuda")) == "2 x NVIDIA H200"
    assert plan.hardware(torch.device("cpu")).startswith("CPU, ")
