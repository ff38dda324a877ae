"""Resumed runs: the same settings and data, all runs on record, and a folder to themselves."""

import dataclasses
import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.callbacks import StopOnRequest, StoppedBySignalError
from vanilla_transformer_tools.training.reports import _moment
from vanilla_transformer_tools.training.resume import (
    check_free,
    claimed,
    continued_record,
    discard_stopped,
)
from vanilla_transformer_tools.training.run_record import describe_run, read_log
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

from ..support.scripts import run_script
from ..support.training_runs import (
    MOMENT,
    assert_same_weights,
    build_arguments,
    build_settings,
    checkpoints_of,
    read_json,
    run_training,
    training_options,
)

SEPARATE = {"separate_vocabularies": True, "target_vocab_size": 300}
UNVALIDATED = {"validated": False}
SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


def run_updates(corpus, folder, updates, *, settings=None, **changes):
    """Trains to some update, without validation."""
    given = {"max_steps": updates, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    return run_training(corpus, folder, {"validated": False, **(settings or {})}, **given | changes)


@pytest.fixture(scope="module")
def first_run(corpus, tmp_path_factory):
    return run_updates(corpus, tmp_path_factory.mktemp("first") / "run", 4)


@pytest.fixture
def folder(first_run, tmp_path):
    return shutil.copytree(first_run, tmp_path / "run")


@pytest.fixture
def record(corpus, tmp_path):
    """What `run.json` says of a run before it begins."""
    settings = build_settings(corpus)
    return describe_run(settings, build_arguments(settings, tmp_path), 0)


def resume(corpus, folder, updates, *, settings=None, **changes):
    """Continues a run to some update."""
    run_updates(corpus, folder, updates, settings={"resume": True, **(settings or {})}, **changes)


def state_of(folder):
    """Each file with its time and content; the lock is nobody's."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# The same settings and data


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"learning_rate": 5e-3}, "--learning_rate was 0.01, got 0.005"),
        ({"seed": 7}, "--seed was 42, got 7"),
        ({"bf16": True}, "--bf16 was False, got True"),
        ({"label_smoothing_factor": 0.0}, "--label_smoothing_factor was 0.1, got 0.0"),
        ({"settings": {"max_tokens_per_batch": 400}}, "--max_tokens_per_batch was 800, got 400"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_resuming_is_refused_with_other_settings(corpus, folder, changes, fault):
    before = state_of(folder)

    with pytest.raises(ValueError, match="continues a run with its own settings") as error:
        resume(corpus, folder, 6, **changes)

    assert fault in str(error.value)
    assert state_of(folder) == before


def test_all_differences_are_named_at_once(corpus, folder):
    with pytest.raises(ValueError, match=r"--r_drop was 0\.0") as error:
        resume(corpus, folder, 6, settings={"r_drop": 1.0}, learning_rate=1.0)

    assert "--learning_rate was 0.01, got 1.0" in str(error.value)


def test_resuming_is_refused_when_a_training_file_has_changed(corpus, folder, tmp_path):
    other = shutil.copytree(corpus, tmp_path / "other")
    (other / "train.en").write_text((other / "train.en").read_text().replace("one", "two"))
    before = state_of(folder)

    with pytest.raises(ValueError, match=r"train\.en has other content than it had \(SHA-256"):
        resume(other, folder, 6)

    assert state_of(folder) == before


def test_resuming_follows_data_that_have_moved(corpus, folder, tmp_path):
    resume(shutil.copytree(corpus, tmp_path / "moved"), folder, 6)

    assert read_json(folder / "run.json")["updates"] == 6


def test_resuming_is_refused_without_the_record_of_the_run(corpus, folder):
    (folder / "run.json").unlink()

    with pytest.raises(ValueError, match=r"--resume needs the run\.json .* got none in"):
        resume(corpus, folder, 6)


def test_every_setting_may_change_or_is_refused(record):
    """A new setting is refused until somebody decides that no update depends on it."""
    others = {field.name: "another value" for field in dataclasses.fields(TrainSettings)}

    with pytest.raises(ValueError, match="--train was") as error:
        continued_record(record, {**record, "settings": others})

    assert {name for name in others if f"--{name} was" not in str(error.value)} == {
        *("data", "resume", "minutes", "max_minutes", "finish_within", "average_last"),
        "early_stopping_patience",
        *("metrics", "validation_sets", "language", "dataset_tags", "license"),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("max_steps", "num_train_epochs", "eval_steps", "logging_steps", "save_total_limit"),
        # What processes do beside training.
        *("ddp_timeout", "ddp_find_unused_parameters"),
    ],
)
def test_length_and_reports_of_a_run_may_change(record, name):
    continued_record(record, {**record, "arguments": {**record["arguments"], name: 77}})


def test_scores_of_a_resumed_run_are_measured_as_before(record):
    others = {"generation_num_beams": 7, "generation_max_length": 77}

    with pytest.raises(ValueError, match="--generation_num_beams was ") as error:
        continued_record(record, {**record, "arguments": {**record["arguments"], **others}})

    assert "--generation_max_length was " in str(error.value)


# On record


def test_each_run_is_recorded_as_it_was(corpus, folder):
    for updates in (6, 8):
        resume(corpus, folder, updates, logging_steps=updates)

    run = read_json(folder / "run.json")
    runs = [*run["previous_runs"], run]
    assert [each["first_update"] for each in runs] == [0, 4, 6]
    assert [each["arguments"]["max_steps"] for each in runs] == [4, 6, 8]
    assert [each["arguments"]["logging_steps"] for each in runs] == [1, 6, 8]
    assert [each["settings"]["resume"] for each in runs] == [False, True, True]
    facts = {"first_update", "command", "hardware", "python", "versions", "commit", "sha256"}
    for before in runs[:2]:
        assert before.keys() == {*facts, "settings", "arguments"}


def test_record_has_the_arguments_that_were_given(first_run):
    assert read_json(first_run / "run.json")["arguments"]["label_smoothing_factor"] == 0.1


def test_finished_run_trains_no_further_when_it_is_resumed(corpus, folder, first_run):
    reports = read_log(folder / "log.jsonl")

    resume(corpus, folder, 4)

    assert_same_weights(folder, first_run)
    assert checkpoints_of(folder) == checkpoints_of(first_run)
    assert read_json(folder / "run.json")["updates"] == 4
    later = read_log(folder / "log.jsonl")
    assert [one for one in later if "loss" in one] == [one for one in reports if "loss" in one]
    # The mean of no losses is not 0.
    assert [one["train_loss"] for one in later if "train_loss" in one] == [
        reports[-1]["train_loss"]
    ]


def test_log_of_a_resumed_run_has_each_update_once(corpus, first_run, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copytree(first_run / "checkpoint-2", folder / "checkpoint-2")
    shutil.copy(first_run / "run.json", folder)
    # A kill cut the last row.
    log = (first_run / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(log[:-9])

    resume(corpus, folder, 4)

    steps = [one["step"] for one in read_log(folder / "log.jsonl") if "loss" in one]
    assert steps == [1, 2, 3, 4]


def test_odd_row_of_a_log_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n[2]\n{"step": 3}\n')

    with pytest.raises(ValueError, match=r"Line 2 of .*log\.jsonl must be a JSON object, got '\[2"):
        read_log(tmp_path / "log.jsonl")


# The weights of one run


def test_resumed_run_ends_with_the_weights_of_one_in_one_go(corpus, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_training(corpus, whole, SEPARATE, num_train_epochs=2)

    run_training(corpus, resumed, SEPARATE, num_train_epochs=1)
    capsys.readouterr()
    run_training(corpus, resumed, SEPARATE | {"resume": True}, num_train_epochs=2)

    assert re.search(rf"; 1 epochs end {MOMENT}\n", capsys.readouterr().out)
    minutes = [report["minutes"] for report in read_log(resumed / "log.jsonl")]
    assert minutes == sorted(minutes)
    # The saved model may be the first epoch's, but the second one ends in a checkpoint.
    last = f"checkpoint-{checkpoints_of(whole)[-1]}"
    assert_same_weights(resumed / last, whole / last)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize(("bpe_dropout", "by_steps"), [(0.0, False), (0.2, True)])
def test_resumed_run_is_the_same_when_it_stopped_amid_an_epoch(
    corpus, tmp_path, bpe_dropout, by_steps
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = {"bpe_dropout": bpe_dropout, "average_last": 2, "max_tokens_per_batch": 2000}
    settings |= UNVALIDATED
    saving = {"save_strategy": "steps", "save_steps": 6} if by_steps else {}
    run_training(corpus, whole, settings, num_train_epochs=2, **saving)
    checkpoints = checkpoints_of(whole)
    updates = checkpoints[-1]

    run_training(corpus, resumed, settings, max_steps=round(0.75 * updates), **saving)
    run_training(corpus, resumed, settings | {"resume": True}, max_steps=updates, **saving)

    assert checkpoints_of(resumed) == checkpoints
    assert_same_weights(resumed, whole)


# A folder of its own


def test_run_is_refused_when_its_folder_is_taken(first_run, corpus):
    before = {path: path.stat().st_mtime_ns for path in first_run.rglob("*")}

    with pytest.raises(ValueError, match=f"{first_run} already holds a run") as caught:
        run_training(corpus, first_run)

    assert "--resume" in str(caught.value)
    assert before == {path: path.stat().st_mtime_ns for path in first_run.rglob("*")}


@pytest.mark.parametrize(
    "name", ["README.md", "run.json", "log.jsonl", "mine_vanilla_transformer.py", "tokenizer.json"]
)
def test_files_of_the_user_are_not_overwritten(corpus, tmp_path, name):
    (tmp_path / name).write_text('{"mine": true}')
    (tmp_path / "notes.txt").write_text("kept")

    with pytest.raises(ValueError, match=f"must hold nothing that training writes, got {name}"):
        run_updates(corpus, tmp_path, 1)

    assert (tmp_path / name).read_text() == '{"mine": true}'
    assert {path.name for path in tmp_path.iterdir()} == {name, "notes.txt"}


def test_other_files_in_the_folder_are_no_obstacle(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path, dirs_exist_ok=True)

    run_updates(tmp_path, tmp_path, 1)

    assert (tmp_path / "model.safetensors").exists()


@pytest.fixture
def abandoned(first_run, tmp_path):
    """The folder of a run that has not ended, with a whole checkpoint."""
    run = read_json(first_run / "run.json")
    del run["weights"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    shutil.copytree(first_run / "checkpoint-2", tmp_path / "checkpoint-2")
    return tmp_path


def test_leftovers_of_a_run_without_a_checkpoint_are_replaced(corpus, abandoned):
    (abandoned / "checkpoint-2" / "files.json").unlink()
    (abandoned / "log.jsonl").write_text('{"step": 5, "minutes": 1000.0, "loss": 9.0}\n')
    unfinished = abandoned / ".saving-0123456789abcdef"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_text("half")

    run_updates(corpus, abandoned, 1)

    assert all(report["minutes"] < 1000 for report in read_log(abandoned / "log.jsonl"))
    assert "previous_runs" not in read_json(abandoned / "run.json")
    assert not unfinished.exists()
    assert checkpoints_of(abandoned) == [1]


def test_abandoned_run_with_a_whole_checkpoint_is_not_overwritten(abandoned):
    with pytest.raises(ValueError, match="already holds a run"):
        check_free(abandoned)


def test_second_training_in_a_folder_is_refused_while_the_first_one_runs(corpus, tmp_path):
    with (
        claimed(tmp_path),
        pytest.raises(ValueError, match=f"{tmp_path} is in use by another training"),
    ):
        run_updates(corpus, tmp_path, 1)

    run_updates(corpus, tmp_path, 1)


def test_run_that_finished_meanwhile_is_not_overwritten(corpus, first_run, tmp_path, monkeypatch):
    def read(*args, **kwargs):
        shutil.copytree(first_run, tmp_path, dirs_exist_ok=True)
        return {}

    monkeypatch.setattr("vanilla_transformer_tools.training.plan.drop_rules", read)
    with pytest.raises(ValueError, match="already holds a run"):
        run_updates(corpus, tmp_path, 1)

    assert_same_weights(tmp_path, first_run)


@pytest.mark.parametrize("trace", ["checkpoint-7", "config.json"])
def test_folder_with_a_trace_of_another_run_is_refused(tmp_path, trace):
    (tmp_path / trace).mkdir()

    with pytest.raises(ValueError, match=f"{tmp_path} already holds a run"):
        check_free(tmp_path)


def test_best_checkpoint_is_found_when_the_folder_has_moved(corpus, tmp_path):
    # Whatever the loss, the first of two updates has the greater one.
    given = {"metric_for_best_model": "loss", "greater_is_better": True, "max_steps": 2}
    for kind in ("save", "eval"):
        given |= {f"{kind}_strategy": "steps", f"{kind}_steps": 1}
    settings = {"average_last": 1, "max_validation_pairs": 1}
    run_training(corpus, tmp_path / "old", settings, **given)
    (tmp_path / "old").rename(tmp_path / "new")

    run_training(corpus, tmp_path / "new", settings | {"resume": True}, **given)

    assert_same_weights(tmp_path / "new", tmp_path / "new" / "checkpoint-1")
    assert read_json(tmp_path / "new" / "run.json")["weights"] == "best checkpoint"


# Signals


@pytest.fixture
def outlived():
    """A SIGTERM that training does not handle fails a test, and does not kill all of them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("outlived")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_a_model_and_ends_with_the_status_of_the_signal(
    corpus, tmp_path, monkeypatch, signum
):
    step = TokenBatchTrainer.training_step

    def disturb(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            signal.raise_signal(signum)
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(TokenBatchTrainer, "training_step", disturb)
    argv = [*training_options(corpus), "--output_dir", tmp_path]

    stopped = run_script(SCRIPT, *argv, "--max_steps", 9)

    assert stopped.returncode == 128 + signum, stopped.stderr
    assert "Stopping after this update" in stopped.stdout
    assert read_json(tmp_path / "run.json")["updates"] == 3
    assert checkpoints_of(tmp_path) == [3]
    assert run_script(SCRIPT, *argv, "--max_steps", 5, "--resume").returncode == 0
    assert read_json(tmp_path / "run.json")["updates"] == 5


def test_no_average_is_tried_after_a_signal_to_another_process(
    corpus, tmp_path, monkeypatch, capsys
):
    settings = {"average_last": 2, "moving_average": 0.5}
    monkeypatch.setattr(StopOnRequest, "is_interrupted", lambda *_: True)

    folder = run_training(corpus, tmp_path, settings, num_train_epochs=2)

    assert read_json(folder / "run.json")["weights"].startswith("best checkpoint")
    said = capsys.readouterr().out
    assert "mean of the last" not in said
    assert "moving average" not in said


def rates_of(folder):
    logs = read_log(folder / "log.jsonl")
    return [log["learning_rate"] for log in logs if "learning_rate" in log]


@pytest.mark.usefixtures("outlived")
def test_signal_finishes_a_run_that_was_asked_to(corpus, tmp_path, monkeypatch, capsys):
    step = TokenBatchTrainer.training_step

    def disturb(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(TokenBatchTrainer, "training_step", disturb)
    settings = {"finish_within": 0.03, "max_validation_pairs": 2}
    given = {"lr_scheduler_type": "constant", "logging_steps": 1}

    run_training(corpus, tmp_path, settings, max_steps=10**5, **given)

    run = read_json(tmp_path / "run.json")
    assert run["finished_on_request"]
    assert 3 <= run["updates"] < 10**5
    assert checkpoints_of(tmp_path)[-1] == run["updates"]
    assert "validation" in read_json(tmp_path / "results.json")
    rates = rates_of(tmp_path)
    assert rates[0] == 1e-2
    assert rates[-1] < 8e-3
    assert f"The model is in {tmp_path}" in capsys.readouterr().out
    # The schedule is the one from before the signal.
    monkeypatch.undo()
    updates = run["updates"] + 2
    run_training(corpus, tmp_path, settings | {"resume": True}, max_steps=updates, **given)
    assert read_json(tmp_path / "run.json")["updates"] == updates
    assert not read_json(tmp_path / "run.json")["finished_on_request"]
    assert [log for log in read_log(tmp_path / "log.jsonl") if "learning_rate" in log][-1][
        "learning_rate"
    ] == 1e-2


@pytest.mark.usefixtures("outlived")
def test_second_signal_ends_at_once_with_the_model_saved(corpus, tmp_path, monkeypatch):
    def press_twice(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StopOnRequest, "on_step_end", press_twice)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with pytest.raises(StoppedBySignalError) as error:
        run_updates(corpus, tmp_path, 9)

    assert error.value.signum == signal.SIGINT
    assert read_json(tmp_path / "run.json")["updates"] == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert read_json(tmp_path / "run.json")["interrupted"]

    # There is nothing to resume from.
    with pytest.raises(ValueError, match=r"already holds a run\. Choose another folder, or delete"):
        run_updates(corpus, tmp_path, 1)
    discard_stopped(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    monkeypatch.undo()
    run_updates(corpus, tmp_path, 1)
    assert not read_json(tmp_path / "run.json")["interrupted"]


def test_run_that_can_be_resumed_is_not_discarded(folder):
    record = read_json(folder / "run.json") | {"interrupted": True}
    (folder / "run.json").write_text(json.dumps(record))

    discard_stopped(folder)

    assert read_json(folder / "run.json") == record
    assert (folder / "model.safetensors").exists()


# Told beforehand


def test_end_of_a_run_is_told_with_its_day_unless_that_is_today(monkeypatch):
    noon = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: noon)

    assert _moment(3600) == "at 13:00"
    assert _moment(24 * 3600) == "on Tuesday, 2026-11-24, at 12:00"
    assert _moment(13 * 3600) == "on Tuesday, 2026-11-24, at 01:00"
