"""A run that diverges stops soon, and leaves its last finite weights."""

import json
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerState

from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.training.reports import read_log
from vanilla_transformer_tools.training.trainer import DivergedError, TokenBatchTrainer

from ..support.training_runs import assert_same_weights, checkpoints_of, read_json, run_training


def diverge(corpus, folder, settings=None, **changes):
    given = {"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 40, "logging_steps": 1}
    run_training(corpus, folder, settings or {"validated": False}, **given | changes)


def test_divergence_stops_the_run_within_a_few_updates(corpus, tmp_path):
    with pytest.raises(ArithmeticError) as error:
        diverge(corpus, tmp_path)

    message = str(error.value)
    assert re.search(r"loss of update [23] is not finite", message)
    assert f"{tmp_path} holds no model" in message
    assert "Lower --learning_rate, now 1e+30" in message
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("checkpoint-*"))
    # The log is JSON, which has no word for the loss.
    last = (tmp_path / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last, parse_constant=pytest.fail)["loss"] == "nan"
    assert math.isnan(read_log(tmp_path / "log.jsonl")[-1]["loss"])


@pytest.mark.parametrize(
    ("device", "update", "is_seen"),
    [("cpu", 3, True), ("cuda", 3, False), ("cuda", 7, False), ("cuda", 8, True)],
)
def test_losses_are_looked_at_after_each_update_or_together_on_a_gpu(device, update, is_seen):
    logs = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=1, device=torch.device(device)),
        state=TrainerState(global_step=update),
        loss_is_finite=torch.tensor(False),
        log=logs.append,
    )
    refusal = pytest.raises(DivergedError, match=f"the loss of update {update} is not finite")

    with refusal if is_seen else nullcontext():
        TokenBatchTrainer.check_losses(trainer)

    assert [math.isnan(log["loss"]) for log in logs] == [True] * is_seen


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
    evaluate = TokenBatchTrainer.evaluation_loop

    def spoil(trainer, *args, **kwargs):
        output = evaluate(trainer, *args, **kwargs)
        if trainer.state.global_step == 3:
            output.metrics["eval_loss"] = math.inf
        return output

    monkeypatch.setattr(TokenBatchTrainer, "evaluation_loop", spoil)
    scored = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-3}
    scored |= {"save_strategy": "steps", "save_steps": 2}
    settings = {"validated": True, "max_validation_pairs": 1}

    # The last one is evaluated because the run ends, after its checkpoint was saved.
    with pytest.raises(DivergedError, match="validation loss after update 3 is not") as error:
        diverge(corpus, tmp_path, settings, max_steps=3, **scored)

    assert "holds the weights of checkpoint-2, the last" in str(error.value)
    assert checkpoints_of(tmp_path)[-1] == 3
    assert_same_weights(tmp_path, tmp_path / "checkpoint-2")
