"""A run that is interrupted and continued: whole checkpoints, the same run, a folder of its own."""

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from vanilla_transformer_tools.files import _HOST
from vanilla_transformer_tools.saved_folder import FILES_FILE
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.checkpoints import (
    check_free,
    claimed,
    close_checkpoint,
    closed_checkpoints,
    delete_oldest,
    failed_writes_named,
    find_checkpoint,
)
from vanilla_transformer_tools.training.record import continued_record, describe_run
from vanilla_transformer_tools.training.reports import read_log
from vanilla_transformer_tools.training.schedule import Schedule, StoppedBySignalError
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

from ..support.full_disk import small_files
from ..support.scripts import run_script
from ..support.training_runs import (
    assert_same_weights,
    build_arguments,
    build_settings,
    checkpoints_of,
    flip_bit,
    read_json,
    run_training,
    training_options,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"


# A checkpoint is whole


@pytest.fixture
def make(tmp_path):
    """Writes a checkpoint of three files, closed or not."""

    def make_checkpoint(update, *, closed=True):
        folder = tmp_path / f"checkpoint-{update}"
        (folder / "global_step").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "optimizer.pt", "global_step/part"):
            (folder / name).write_text(name)
        if closed:
            close_checkpoint(folder)
        return folder

    return make_checkpoint


def test_newest_whole_checkpoint_is_resumed_and_newer_ones_are_explained(make, tmp_path, capsys):
    for update in (8, 9, 10, 11, 12, 13):
        make(update, closed=update != 12)
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_text("other bytes")
    (tmp_path / "checkpoint-11" / "global_step" / "part").unlink()
    (tmp_path / "checkpoint-13" / "optimizer.pt").unlink()
    close_checkpoint(tmp_path / "checkpoint-13")
    (tmp_path / "checkpoint-best").mkdir()

    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    assert capsys.readouterr().out.splitlines() == [
        "checkpoint-13 is skipped: it holds no state of the optimizer (--save_only_model)",
        "checkpoint-12 is skipped: it has no files.json, so the run ended while saving it",
        "checkpoint-11 is skipped: its global_step/part is missing",
        "checkpoint-10 is skipped: its optimizer.pt has other bytes than were saved",
    ]


@pytest.mark.parametrize(("part", "damage"), [("bytes", "byves"), ("sha256", "sha255"), ("{", "")])
def test_checkpoint_whose_list_is_damaged_is_skipped(make, tmp_path, part, damage):
    whole, record = make(9), make(10) / FILES_FILE
    text = record.read_text()
    record.write_text(text.replace(part, damage))
    assert record.read_text() != text

    assert find_checkpoint(tmp_path) == whole


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [2, 4, 6, 8]),
        (2, None, [4, 6]),
        (2, 2, [2, 6]),
        (1, 2, [2, 6]),
        (3, 8, [4, 6, 8]),
    ],
)
def test_oldest_checkpoints_are_deleted(tmp_path, limit, best, kept):
    # The run was resumed from the fourth update, because checkpoint-8 was damaged, and then copied.
    for second, update in enumerate((6, 4, 2, 8)):
        checkpoint = tmp_path / f"checkpoint-{update}"
        checkpoint.mkdir()
        os.utime(checkpoint, (1000 + second / 10, 1000 + second / 10))

    best = best and tmp_path / f"checkpoint-{best}"
    delete_oldest(tmp_path / "checkpoint-6", limit, best)

    assert checkpoints_of(tmp_path) == kept


# The run goes on


def run_updates(corpus, folder, updates, *, settings=None, **changes):
    """Trains to some update, without validation."""
    given = {"max_steps": updates, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    return run_training(corpus, folder, {"validated": False, **(settings or {})}, **given | changes)


@pytest.fixture(scope="module")
def first_run(corpus, tmp_path_factory):
    return run_updates(corpus, tmp_path_factory.mktemp("first") / "run", 6)


@pytest.fixture
def folder(first_run, tmp_path):
    return shutil.copytree(first_run, tmp_path / "run")


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


def test_resumed_run_follows_moved_data_and_saves_as_often_as_it_is_told(
    corpus, folder, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    resume(shutil.copytree(corpus, tmp_path / "moved"), folder, 9, save_steps=1)

    assert checkpoints_of(folder) == [4, 6, 7, 8, 9]
    # Files store tied weights once, so Trainer could miss the others.
    assert not any("missing" in message for message in caplog.messages)


def test_resuming_is_refused_when_no_checkpoint_is_whole(corpus, folder):
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "trainer_state.json").unlink()
    before = sorted(folder.rglob("*"))

    with pytest.raises(ValueError, match="needs a whole checkpoint") as error:
        resume(corpus, folder, 6)

    assert str(error.value).count("its trainer_state.json is missing") == 3
    assert sorted(folder.rglob("*")) == before


def test_checkpoint_that_is_written_anew_does_not_count_meanwhile(corpus, folder, monkeypatch):
    (folder / "checkpoint-6" / "scheduler.pt").unlink()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenBatchTrainer, "_save_optimizer_and_scheduler", fail)
    with pytest.raises(OSError, match="No space left"):
        resume(corpus, folder, 6)

    assert [path.name for path in closed_checkpoints(folder)][-1] == "checkpoint-4"


@pytest.mark.parametrize("save_strategy", ["steps", "no"], ids=["checkpoint", "model"])
def test_full_disk_is_named_while_saving(corpus, tmp_path, save_strategy):
    folder = tmp_path / "run"

    named = re.escape(f"Saving into {folder} failed: ")
    with small_files(120_000), pytest.raises(OSError, match=f"{named}.*File too large"):
        run_updates(corpus, folder, 2, save_strategy=save_strategy)

    assert not closed_checkpoints(folder)
    # Tokenizers raise a bare exception.
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    with pytest.raises(OSError, match="failed: No space left"), failed_writes_named(folder):
        tokenizer.save("/dev/full")


def test_best_checkpoint_that_has_changed_is_not_loaded(corpus, tmp_path, monkeypatch, capsys):
    def damage(self, args, state, *others, **named):
        if state.global_step == 3:
            flip_bit(tmp_path / "checkpoint-2" / "model.safetensors")

    monkeypatch.setattr(Schedule, "on_step_end", damage)
    # Otherwise the last checkpoint, whose loss would be lower, would be the best.
    scored = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0}
    scored |= {"save_strategy": "steps", "save_steps": 2}

    run_training(corpus, tmp_path, {"average_last": 0}, max_steps=3, **scored)

    assert "checkpoint-2 is skipped: its model.safetensors has other" in capsys.readouterr().out
    assert read_json(tmp_path / "run.json")["weights"] == "last update"
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_weights(tmp_path, tmp_path / "checkpoint-2")


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


def test_finished_run_trains_no_further_when_it_is_resumed(corpus, folder, first_run):
    reports = read_log(folder / "log.jsonl")

    resume(corpus, folder, 6)

    assert_same_weights(folder, first_run)
    assert checkpoints_of(folder) == checkpoints_of(first_run)
    assert read_json(folder / "run.json")["updates"] == 6
    later = read_log(folder / "log.jsonl")
    assert [one for one in later if "loss" in one] == [one for one in reports if "loss" in one]
    # The mean of no losses is not 0.
    assert [one["train_loss"] for one in later if "train_loss" in one] == [
        reports[-1]["train_loss"]
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"bpe_dropout": 0.2, "separate_vocabularies": True, "target_vocab_size": 300},
        {"all_caps_every": 3, "title_case_every": 4},
        {"streaming": True, "shuffle_buffer": 100, "max_length": 60, "r_drop": 1.0},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_resumed_run_is_the_same_when_it_stopped_amid_an_epoch(corpus, tmp_path, changes):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = {**changes, "average_last": 2, "max_tokens_per_batch": 2000, "validated": False}
    given = {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    given |= {"bf16": "streaming" in changes, "logging_steps": 1}
    run_training(corpus, whole, settings, max_steps=9, **given)

    run_training(corpus, resumed, settings, max_steps=7, **given)
    run_training(corpus, resumed, settings | {"resume": True}, max_steps=9, **given)

    assert checkpoints_of(resumed) == checkpoints_of(whole) == [8, 9]
    losses, expected = (
        [(one["step"], one["loss"]) for one in read_log(folder / "log.jsonl") if "loss" in one]
        for folder in (resumed, whole)
    )
    assert losses == expected
    assert_same_weights(resumed, whole)


# The same settings and data


@pytest.fixture
def record(corpus, tmp_path):
    """What `run.json` says of a run before it begins."""
    settings = build_settings(corpus)
    return describe_run(settings, build_arguments(settings, tmp_path), 0)


def test_resuming_is_refused_with_other_settings_or_data(corpus, folder, tmp_path):
    other = shutil.copytree(corpus, tmp_path / "other")
    (other / "train.en").write_text((other / "train.en").read_text().replace("one", "two"))
    before = state_of(folder)

    with pytest.raises(ValueError, match="continues a run with its own settings") as error:
        resume(other, folder, 8, learning_rate=5e-3, settings={"max_tokens_per_batch": 400})

    assert "--learning_rate was 0.01, got 0.005" in str(error.value)
    assert "--max_tokens_per_batch was 800, got 400" in str(error.value)
    assert "train.en has other content than it had (SHA-256" in str(error.value)
    assert state_of(folder) == before
    (folder / "run.json").unlink()
    with pytest.raises(ValueError, match=r"--resume needs the run\.json .* got none"):
        resume(corpus, folder, 8)


def test_every_setting_may_change_or_is_refused(record):
    """A new setting is refused until somebody decides that no update depends on it."""
    others = {field.name: "another value" for field in dataclasses.fields(TrainSettings)}

    with pytest.raises(ValueError, match="--train was") as error:
        continued_record(record, {**record, "settings": others})

    assert {name for name in others if f"--{name} was" not in str(error.value)} == {
        *("data", "resume", "minutes", "max_minutes", "average_last"),
        "early_stopping_patience",
        *("metrics", "language", "dataset_tags", "license"),
    }


def test_length_and_reports_of_a_run_may_change_but_not_its_scores(record):
    def resumed(**changes):
        return {**record, "arguments": {**record["arguments"], **changes}}

    continued_record(record, resumed(max_steps=77, eval_steps=77, ddp_timeout=77))
    with pytest.raises(ValueError, match="--generation_num_beams was ") as error:
        continued_record(record, resumed(generation_num_beams=7, generation_max_length=77))

    assert str(error.value).count("--generation_") == 2


def test_each_run_is_recorded_as_it_was(corpus, folder):
    for updates in (8, 10):
        resume(corpus, folder, updates, logging_steps=updates)

    run = read_json(folder / "run.json")
    runs = [*run["previous_runs"], run]
    assert [each["first_update"] for each in runs] == [0, 6, 8]
    assert [each["arguments"]["max_steps"] for each in runs] == [6, 8, 10]
    assert [each["arguments"]["logging_steps"] for each in runs] == [1, 8, 10]
    assert [each["settings"]["resume"] for each in runs] == [False, True, True]
    facts = {"first_update", "command", "hardware", "python", "versions", "commit", "sha256"}
    for before in runs[:2]:
        assert before.keys() == {*facts, "settings", "arguments"}


def test_odd_row_of_a_log_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n[2]\n{"step": 3}\n')

    with pytest.raises(ValueError, match=r"Line 2 of .*log\.jsonl must be a JSON object, got '\[2"):
        read_log(tmp_path / "log.jsonl")


# A folder of its own


@pytest.mark.parametrize("name", ["README.md", "run.json"])
def test_files_of_the_user_are_not_overwritten(corpus, tmp_path, name):
    (tmp_path / name).write_text('{"mine": true}')
    (tmp_path / "notes.txt").write_text("kept")

    with pytest.raises(ValueError, match=f"must hold nothing that training writes, got {name}"):
        run_updates(corpus, tmp_path, 1)

    assert (tmp_path / name).read_text() == '{"mine": true}'
    assert {path.name for path in tmp_path.iterdir()} == {name, "notes.txt"}


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
    # No process has this number.
    unfinished = abandoned / f".saving-{_HOST}-{2**30}-01234567"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_text("half")

    run_updates(corpus, abandoned, 1)

    assert all(report["minutes"] < 1000 for report in read_log(abandoned / "log.jsonl"))
    assert "previous_runs" not in read_json(abandoned / "run.json")
    assert not unfinished.exists()
    assert checkpoints_of(abandoned) == [1]


def test_folder_with_a_trace_of_another_run_is_refused(abandoned, tmp_path):
    others = [tmp_path / "a" / "checkpoint-7", tmp_path / "b" / "config.json"]
    for trace in others:
        trace.mkdir(parents=True)

    for folder in (abandoned, *(trace.parent for trace in others)):
        with pytest.raises(ValueError, match=f"{folder} already holds a run"):
            check_free(folder)


def test_second_training_in_a_folder_is_refused(corpus, first_run, tmp_path, monkeypatch):
    with (
        claimed(tmp_path),
        pytest.raises(ValueError, match=f"{tmp_path} is in use by another training"),
    ):
        run_updates(corpus, tmp_path, 1)

    def finish_another_run(*args, **kwargs):
        shutil.copytree(first_run, tmp_path, dirs_exist_ok=True)
        return {}

    monkeypatch.setattr("vanilla_transformer_tools.text.filters.drop_rules", finish_another_run)
    with pytest.raises(ValueError, match="already holds a run"):
        run_updates(corpus, tmp_path, 1)
    assert_same_weights(tmp_path, first_run)


# Signals


@pytest.fixture
def outlived():
    """A SIGTERM that training does not handle fails a test, and does not kill all of them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def disturbed(outlived, monkeypatch):
    """SIGTERM comes during the third update."""
    step = TokenBatchTrainer.training_step

    def disturb(trainer, *args, **kwargs):
        if trainer.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(TokenBatchTrainer, "training_step", disturb)


@pytest.mark.usefixtures("disturbed")
def test_signal_saves_a_model_and_ends_with_the_status_of_the_signal(corpus, tmp_path):
    argv = [*training_options(corpus), "--output_dir", tmp_path]

    stopped = run_script(SCRIPT, *argv, "--max_steps", 9)

    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert "Stopping after this update" in stopped.stdout
    assert read_json(tmp_path / "run.json")["updates"] == 3
    assert checkpoints_of(tmp_path) == [3]
    assert run_script(SCRIPT, *argv, "--max_steps", 5, "--resume").returncode == 0
    assert read_json(tmp_path / "run.json")["updates"] == 5


def test_no_average_is_tried_after_a_signal_to_another_process(
    corpus, tmp_path, monkeypatch, capsys
):
    settings = {"average_last": 2, "moving_average": 0.5}
    monkeypatch.setattr(Schedule, "is_interrupted", lambda *_: True)

    folder = run_training(corpus, tmp_path, settings, num_train_epochs=2)

    assert read_json(folder / "run.json")["weights"].startswith("best checkpoint")
    said = capsys.readouterr().out
    assert "mean of the last" not in said
    assert "moving average" not in said


@pytest.mark.usefixtures("outlived")
def test_second_signal_ends_at_once_with_the_model_saved(corpus, tmp_path, monkeypatch):
    def press_twice(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Schedule, "on_step_end", press_twice)
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
