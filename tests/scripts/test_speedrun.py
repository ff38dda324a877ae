"""`scripts/speedrun.py`: when a target is reached, and two runs of a seed compared."""

import json
import os
import shlex
import shutil
import sys
import threading
from dataclasses import replace

import pytest

import speedrun

from ..support.documents import ROOT
from ..support.training_runs import training_options

STARTED = 1_000_000_000
RUN = {"parameters": 2_000_000, "commit": "abc1234", "hardware": "CPU, 2 threads"}
# The log begins 30 seconds after the command. Each evaluation takes 6 seconds.
REPORTS = [
    {"step": 10, "minutes": 1.0, "loss": 5.0},
    {"step": 20, "minutes": 2.0, "eval_bleu": 30.0, "eval_wer": 60.0, "eval_runtime": 6.0},
    {"step": 30, "minutes": 3.0, "eval_bleu": 33.9, "eval_wer": 51.0, "eval_runtime": 6.0},
    {"step": 40, "minutes": 4.0, "eval_bleu": 35.0, "eval_wer": 50.0, "eval_runtime": 6.0},
    {"step": 50, "minutes": 5.0, "eval_bleu": 34.0, "eval_wer": 50.0, "eval_runtime": 6.0},
]


@pytest.fixture
def folder(tmp_path):
    """A finished run."""
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in REPORTS))
    (tmp_path / ".options").touch()
    os.utime(tmp_path / ".options", (STARTED, STARTED))
    os.utime(tmp_path / "log.jsonl", (STARTED + 330, STARTED + 330))
    return tmp_path


@pytest.mark.parametrize(
    ("metric", "target", "update", "seconds"),
    [("bleu", 34, 40, 30 + 240 - 18), ("bleu", 30, 20, 30 + 120 - 6), ("wer", 51, 30, 30 + 168)],
)
def test_time_ends_with_the_first_evaluation_at_the_target_and_has_all_but_evaluations(
    folder, metric, target, update, seconds
):
    found = speedrun.arrival(folder, metric, target)

    assert (found.updates, found.started) == (update, STARTED)
    assert found.seconds == pytest.approx(seconds)


def test_run_that_misses_the_target_is_no_record(folder):
    with pytest.raises(ValueError, match=r"must reach bleu 36, got 30\.00, 33\.90, 35\.00, 34\.00"):
        speedrun.arrival(folder, "bleu", 36)


def test_larger_model_is_refused(folder):
    (folder / "run.json").write_text(json.dumps(RUN | {"parameters": 3_000_001}))

    with pytest.raises(ValueError, match=r"may have 3,000,000 parameters, got 3,000,001"):
        speedrun.arrival(folder, "bleu", 34)


def arrivals(*seconds):
    return tuple(speedrun.Arrival(each, 70, STARTED, RUN) for each in seconds)


def test_ratios_are_of_runs_of_one_seed():
    cells = speedrun.compare([arrivals(100, 50), arrivals(300, 180)], "Muon", "bleu 34")

    given = dict(zip(speedrun.COLUMNS, cells, strict=True))
    assert given["ratio"] == "0.55"
    assert given["range"] == "0.50-0.60"
    assert (given["baseline, minutes"], given["entry, minutes"]) == ("3.33", "1.92")
    assert given["commit"] == "abc1234"


def test_runs_that_began_at_different_times_are_not_compared():
    baseline, entry = arrivals(100, 50)
    late = replace(entry, started=STARTED + 90)

    with pytest.raises(ValueError, match=r"within 60 seconds, got 90"):
        speedrun.compare([(baseline, late)], "Muon", "bleu 34")


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """Runs the script on a plan."""

    def run(plan, *seeds):
        (tmp_path / "plan.yaml").write_text(json.dumps(plan))
        words = ["plan.yaml", "Tiny Muon", "--data", ".", "--output", "runs"]
        words += ["--records", "records.md", "--seeds", *seeds]
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["speedrun.py", *words])
        speedrun.main()

    return run


PLAN = {"metric": "wer", "target": 1e9, "rows": {"Tiny Muon": "--optimizer muon"}}


def test_entry_and_baseline_run_together(folder, run_script, monkeypatch, capsys):
    begun, both = {}, threading.Barrier(2, timeout=60)

    def train(to, words):
        begun[to.name] = shlex.join(words)
        both.wait()
        shutil.copytree(folder, to, ignore=lambda *_: ["runs", "plan.yaml"])

    monkeypatch.setattr(speedrun, "train", train)

    run_script(PLAN | {"options": "--minutes 1"}, "1", "2")

    assert sorted(begun) == ["baseline-1", "baseline-2", "tiny-muon-1", "tiny-muon-2"]
    assert begun["baseline-2"] == "--minutes 1 --data . --seed 2 --disable_tqdm true"
    assert begun["tiny-muon-1"].startswith("--minutes 1 --optimizer muon --data . --seed 1")
    assert "\n" + capsys.readouterr().out == (folder / "records.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trained_models_leave_a_row(corpus, run_script, capfd):
    words = training_options(corpus, "d_model=8", "encoder_ffn_dim=8", "decoder_ffn_dim=8")
    words += ["--validation", corpus / "validation.de", corpus / "validation.en"]
    words += ["--max_steps", 2, "--eval_strategy", "steps", "--eval_steps", 1]
    words += ["--metrics", "wer", "--max_validation_pairs", 5]

    run_script(PLAN | {"options": shlex.join(map(str, words))}, "1")

    cells = [cell.strip() for cell in capfd.readouterr().out.splitlines()[2].split("|")]
    assert cells[1:4] == ["Tiny Muon", "wer 1e+09", "1"]
    assert cells[8] == "1"
    # Starting Python takes longer than this.
    assert all(0.01 < float(cell) < 10 for cell in cells[4:6])


def test_entry_that_is_not_one_row_of_the_plan_is_refused(monkeypatch):
    plan = str(ROOT / "scripts" / "speedrun.yaml")
    words = ["speedrun.py", plan, "Muon*", "--data", ".", "--output", "runs"]
    monkeypatch.setattr(sys, "argv", words)

    with pytest.raises(ValueError, match="One entry must be named, got Muon, Muon, half of the"):
        speedrun.main()
