"""What is resumed from: whole checkpoints only, finite weights only."""

import json
import math
import os
import re
import shutil

import pytest
import torch

from vanilla_transformer_tools.saved_folder import FILES_FILE, load_model
from vanilla_transformer_tools.training.callbacks import DivergedError, StopOnRequest
from vanilla_transformer_tools.training.checkpoints import (
    check_optimizer,
    close_checkpoint,
    closed_checkpoints,
    delete_oldest,
    delete_unclosed,
    reopen_checkpoint,
    resumable_checkpoint,
)
from vanilla_transformer_tools.training.run_record import read_log
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

from ..support.full_disk import small_files
from ..support.training_runs import (
    assert_same_weights,
    checkpoints_of,
    flip_bit,
    read_json,
    run_training,
)

BY_UPDATES = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 5}


def run_updates(corpus, folder, updates, *, resume=False, **changes):
    """Trains to some update without validation, with a checkpoint after each second one."""
    settings = {"validated": False, "average_last": 1, "resume": resume}
    return run_training(corpus, folder, settings, max_steps=updates, **BY_UPDATES | changes)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return run_updates(corpus, tmp_path_factory.mktemp("run") / "whole", 6)


@pytest.fixture
def interrupted(run, tmp_path):
    """The same, killed after the last checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    for checkpoint in run.glob("checkpoint-*"):
        shutil.copytree(checkpoint, folder / checkpoint.name)
    shutil.copy(run / "run.json", folder)
    return folder


def test_checkpoint_lists_all_its_files_with_sizes_and_checksums(run):
    checkpoint = run / "checkpoint-4"
    files = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != FILES_FILE
    }

    listed = read_json(checkpoint / FILES_FILE)

    assert {name: entry["bytes"] for name, entry in listed.items()} == files
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"} <= files.keys()


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [2, 4, 6, 8]),
        (0, None, [2, 4, 6, 8]),
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

    best = best and str(tmp_path / f"checkpoint-{best}")
    delete_oldest(tmp_path / "checkpoint-6", limit, best)

    assert checkpoints_of(tmp_path) == kept


def test_resumed_run_saves_as_often_as_it_is_told(corpus, interrupted):
    run_updates(corpus, interrupted, 9, resume=True, save_steps=1)

    assert checkpoints_of(interrupted) == [4, 6, 7, 8, 9]


def test_resuming_passes_over_several_broken_checkpoints(corpus, run, interrupted, capsys):
    with open(interrupted / "checkpoint-6" / "optimizer.pt", "r+b") as file:
        file.truncate(1000)
    flip_bit(interrupted / "checkpoint-4" / "model.safetensors")

    run_updates(corpus, interrupted, 6, resume=True)

    said = capsys.readouterr().out
    assert "checkpoint-6 is skipped: its optimizer.pt has other bytes than were saved" in said
    assert "checkpoint-4 is skipped: its model.safetensors has other bytes" in said
    assert_same_weights(interrupted, run)


def test_resuming_is_refused_when_no_checkpoint_is_whole(corpus, interrupted):
    for checkpoint in interrupted.glob("checkpoint-*"):
        (checkpoint / "trainer_state.json").unlink()
    before = sorted(interrupted.rglob("*"))

    with pytest.raises(ValueError, match="needs a whole checkpoint") as error:
        run_updates(corpus, interrupted, 6, resume=True)

    assert str(error.value).count("its trainer_state.json is missing") == 3
    assert sorted(interrupted.rglob("*")) == before


def test_resuming_is_refused_when_the_optimizer_was_never_saved(corpus, tmp_path):
    run_updates(corpus, tmp_path, 2, save_only_model=True)

    with pytest.raises(ValueError, match=r"no state of the optimizer \(--save_only_model\)"):
        run_updates(corpus, tmp_path, 6, resume=True)


def test_unclosed_checkpoints_are_deleted_by_a_resumed_run_and_never_averaged(corpus, interrupted):
    shutil.copytree(interrupted / "checkpoint-6", interrupted / "checkpoint-9")
    (interrupted / "checkpoint-9" / FILES_FILE).unlink()
    assert [path.name for path in closed_checkpoints(interrupted)][-1] == "checkpoint-6"

    run_updates(corpus, interrupted, 8, resume=True)

    assert checkpoints_of(interrupted) == [2, 4, 6, 8]


def test_checkpoint_that_is_written_anew_does_not_count_meanwhile(corpus, interrupted, monkeypatch):
    (interrupted / "checkpoint-6" / "scheduler.pt").unlink()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TokenBatchTrainer, "_save_optimizer_and_scheduler", fail)
    with pytest.raises(OSError, match="No space left"):
        run_updates(corpus, interrupted, 6, resume=True)

    assert [path.name for path in closed_checkpoints(interrupted)][-1] == "checkpoint-4"


@pytest.mark.parametrize(
    ("save_strategy", "saved"), [("steps", "checkpoint-2"), ("no", "")], ids=["checkpoint", "model"]
)
def test_full_disk_is_named_while_saving(corpus, tmp_path, save_strategy, saved):
    folder = tmp_path / "run"

    named = re.escape(f"Saving into {folder / saved} failed: ")
    with small_files(120_000), pytest.raises(OSError, match=f"{named}.*File too large"):
        run_updates(corpus, folder, 2, save_strategy=save_strategy)

    assert not closed_checkpoints(folder)


def test_best_checkpoint_that_has_changed_is_not_loaded(corpus, tmp_path, monkeypatch, capsys):
    def damage(self, args, state, *others, **named):
        if state.global_step == 3:
            flip_bit(tmp_path / "checkpoint-2" / "model.safetensors")

    monkeypatch.setattr(StopOnRequest, "on_step_end", damage)
    # Otherwise the last checkpoint, whose loss would be lower, would be the best.
    scored = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0}

    run_training(corpus, tmp_path, {"average_last": 0}, max_steps=3, **BY_UPDATES, **scored)

    assert "checkpoint-2 is skipped: its model.safetensors has other" in capsys.readouterr().out
    assert read_json(tmp_path / "run.json")["weights"] == "last update"
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_weights(tmp_path, tmp_path / "checkpoint-2")


# Without a run


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


def test_checkpoints_are_in_the_order_of_their_updates(make, tmp_path):
    whole = [make(update) for update in (9, 10, 100)]
    make(50, closed=False)
    (tmp_path / "checkpoint-7").write_text("no folder")
    (tmp_path / "checkpoint-best").mkdir()

    assert closed_checkpoints(tmp_path) == whole


def test_newest_whole_checkpoint_is_resumed_and_newer_ones_are_explained(make, tmp_path):
    for update in (8, 9, 10, 11, 12):
        make(update, closed=update != 12)
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_text("other bytes")
    (tmp_path / "checkpoint-11" / "global_step" / "part").unlink()

    checkpoint, skipped = resumable_checkpoint(tmp_path)

    assert checkpoint == tmp_path / "checkpoint-9"
    assert [(path.name, fault) for path, fault in skipped.items()] == [
        ("checkpoint-12", "it has no files.json, so the run ended while saving it"),
        ("checkpoint-11", "its global_step/part is missing"),
        ("checkpoint-10", "its optimizer.pt has other bytes than were saved"),
    ]


def test_checkpoint_that_lost_its_config_while_it_was_listed_is_skipped(make, tmp_path):
    folder = make(9, closed=False)
    (folder / "config.json").unlink()
    close_checkpoint(folder)

    assert resumable_checkpoint(tmp_path) == (None, {folder: "it has no config.json"})


@pytest.mark.parametrize("was_sharded", [False, True])
def test_run_is_resumed_under_fsdp_if_it_began_so(make, was_sharded):
    folder = make(9)
    if was_sharded:
        (folder / "optimizer.pt").rename(folder / "optimizer.bin")

    check_optimizer(folder, was_sharded)

    before, now = ("with", "without") if was_sharded else ("without", "with")
    with pytest.raises(ValueError, match=f"checkpoint-9 {before} FSDP, .* got a run {now} it"):
        check_optimizer(folder, not was_sharded)


@pytest.mark.parametrize(
    ("part", "damage"), [("bytes", "byves"), ("xxh3_128", "xxh3_129"), ("{", ""), ("}", "")]
)
def test_checkpoint_whose_list_is_damaged_is_skipped(make, tmp_path, part, damage):
    whole, record = make(9), make(10) / FILES_FILE
    text = record.read_text()
    record.write_text(text.replace(part, damage))
    assert record.read_text() != text

    assert resumable_checkpoint(tmp_path)[0] == whole


def test_reopened_checkpoint_counts_no_longer_and_is_deleted_by_the_next_run(make, tmp_path):
    whole, reopened = make(9), make(10)
    reopen_checkpoint(reopened)
    reopen_checkpoint(reopened)

    delete_unclosed(tmp_path)

    assert list(tmp_path.iterdir()) == [whole]


# Divergence


def diverge(corpus, folder, settings=None, **changes):
    given = {"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 40, "logging_steps": 1}
    run_training(corpus, folder, settings or {"validated": False}, **given | changes)


@pytest.fixture(scope="module")
def diverged(corpus, tmp_path_factory):
    """Folder of a run that diverged at once, and its error."""
    folder = tmp_path_factory.mktemp("diverged")
    with pytest.raises(ArithmeticError) as error:
        diverge(corpus, folder)
    return folder, str(error.value)


def test_divergence_stops_the_run_within_a_few_updates(diverged):
    folder, message = diverged

    assert re.search(r"loss of update [23] is not finite", message)
    assert f"{folder} holds no model" in message
    assert "Lower --learning_rate, now 1e+30" in message
    assert not list(folder.glob("*.safetensors"))
    assert not list(folder.glob("checkpoint-*"))


def test_log_of_a_diverged_run_is_json_and_has_the_true_loss(diverged):
    def refuse(name):
        raise AssertionError(name)

    file = diverged[0] / "log.jsonl"
    reports = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
    assert reports[-1]["loss"] == "nan"
    assert math.isnan(read_log(file)[-1]["loss"])


def spoil_after(updates, monkeypatch):
    """Makes a weight NaN after some updates."""
    step = TokenBatchTrainer.training_step

    def spoil(trainer, model, *args, **kwargs):
        loss = step(trainer, model, *args, **kwargs)
        if trainer.state.global_step == updates:
            with torch.no_grad():
                next(model.parameters())[5:] = torch.nan
        return loss

    monkeypatch.setattr(TokenBatchTrainer, "training_step", spoil)


BY_EACH_UPDATE = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3}
SCORED = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize("validated", [False, True])
def test_diverged_run_leaves_the_last_finite_checkpoint(corpus, tmp_path, validated, monkeypatch):
    spoil_after(3, monkeypatch)
    scored = SCORED if validated else {}

    with pytest.raises(ArithmeticError, match=r"holds the weights of checkpoint-3, the last"):
        diverge(corpus, tmp_path, {"validated": validated}, **BY_EACH_UPDATE, **scored)

    assert_same_weights(tmp_path, tmp_path / "checkpoint-3")
    record = read_json(tmp_path / "run.json")
    assert record["updates"] == 3
    assert record["weights"] == "checkpoint-3, before training diverged"
    load_model(str(tmp_path))


def test_weights_that_are_not_finite_are_not_saved_after_the_last_update(
    corpus, tmp_path, monkeypatch
):
    spoil_after(1, monkeypatch)

    with pytest.raises(ArithmeticError, match="are not finite after update 2"):
        diverge(corpus, tmp_path, learning_rate=1e-3, max_steps=2, save_strategy="no")

    assert not list(tmp_path.glob("*.safetensors"))


def test_weights_whose_validation_loss_is_not_finite_are_not_kept(corpus, tmp_path, monkeypatch):
    evaluate = TokenBatchTrainer.evaluate

    def evaluate_or_diverge(trainer, *args, **kwargs):
        if trainer.state.global_step == 3:
            raise DivergedError("the validation loss after update 3 is not finite")
        return evaluate(trainer, *args, **kwargs)

    monkeypatch.setattr(TokenBatchTrainer, "evaluate", evaluate_or_diverge)
    scored = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-3}
    settings = {"validated": True, "max_validation_pairs": 1}

    # The last one is evaluated because the run ends, after its checkpoint was saved.
    with pytest.raises(ArithmeticError, match=r"holds the weights of checkpoint-2, the last"):
        diverge(corpus, tmp_path, settings, max_steps=3, **BY_UPDATES | scored)

    assert checkpoints_of(tmp_path)[-1] == 3
    assert_same_weights(tmp_path, tmp_path / "checkpoint-2")


def test_validation_loss_that_is_not_finite_ends_the_run(corpus, tmp_path, monkeypatch):
    def evaluate(trainer, *args, **kwargs):
        metrics = {"eval_loss": float("inf"), "eval_bleu": 1.0}
        trainer.control = trainer.callback_handler.on_evaluate(
            trainer.args, trainer.state, trainer.control, metrics
        )
        return metrics

    monkeypatch.setattr(TokenBatchTrainer, "evaluate", evaluate)

    with pytest.raises(ArithmeticError, match="validation loss after update 1 is not finite"):
        diverge(corpus, tmp_path, {"validated": True}, **BY_EACH_UPDATE, **SCORED)
