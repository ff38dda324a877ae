"""Averages of weights: of checkpoints, each tensor once, and a moving one."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerState

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.training.averaging import (
    MovingAverage,
    Outcome,
    average_checkpoints,
    average_weights,
    best_weights,
    evaluations_since_best,
    prefer_last,
    try_weights,
)
from vanilla_transformer_tools.training.checkpoints import close_checkpoint

from ..support.training_runs import flip_bit


@pytest.fixture
def saved(tiny_config, tmp_path):
    """State dicts of three models, and the folders where they are saved, one of them sharded."""
    states, folders = [], []
    for step, shard_size in ((9, "1GB"), (10, "5KB"), (100, "1GB")):
        torch.manual_seed(step)
        model = VanillaTransformerForConditionalGeneration(tiny_config)
        folder = tmp_path / f"checkpoint-{step}"
        model.save_pretrained(folder, max_shard_size=shard_size)
        states.append(model.state_dict())
        folders.append(folder)
    return states, folders


def test_average_is_the_mean_of_each_tensor(saved):
    states, folders = saved

    mean = average_checkpoints(folders)

    assert list(folders[1].glob("*.index.json"))
    tied = {"lm_head.weight", "model.encoder.embed_tokens.weight"}
    assert mean.keys() == states[0].keys() - tied - {"model.decoder.embed_tokens.weight"}
    for name, tensor in mean.items():
        expected = torch.stack([state[name] for state in states]).mean(0)
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected)


def test_average_of_many_bfloat16_checkpoints_rounds_once(tiny_config, tmp_path):
    model = VanillaTransformerForConditionalGeneration(tiny_config).bfloat16()
    model.save_pretrained(tmp_path)

    mean = average_checkpoints([tmp_path] * 7)

    # Sums in bfloat16 would be off by then.
    for name, tensor in mean.items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_average_refuses_other_tensors_and_shapes(saved, tiny_config, tmp_path):
    _, folders = saved
    for change, fault in (
        (
            {"tie_word_embeddings": False},
            r"'lm_head.weight' of shape None in .* and \[\d+, \d+\] in",
        ),
        (
            {"encoder_ffn_dim": 30},
            r"'model.encoder.layers.0.fc1.bias' of shape \[\d+\] in .* and \[30\] in",
        ),
    ):
        config = type(tiny_config)(**{**tiny_config.to_dict(), **change})
        other = tmp_path / "other"
        VanillaTransformerForConditionalGeneration(config).save_pretrained(other)

        with pytest.raises(ValueError, match=fault):
            average_checkpoints([folders[0], other])


@pytest.mark.parametrize(
    ("metric", "best", "mean", "is_taken"),
    [
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 30.1, "loss": 2.1}, True),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 30.0, "loss": 2.1}, False),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 29.9, "loss": 1.9}, True),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 29.9, "loss": 2.0}, False),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 40.0, "loss": math.nan}, False),
        ("loss", {"loss": 2.0}, {"loss": math.nan}, False),
        ("wer", {"wer": 10.0, "loss": 2.0}, {"wer": 9.9, "loss": 2.1}, True),
    ],
)
def test_averaged_weights_are_taken_if_score_or_loss_is_better(metric, best, mean, is_taken):
    trainer = OneWeightTrainer(mean, metric=metric)
    before = trainer.model.weight.item()
    weights = {"weight": torch.full((1, 1), 7.0)}

    outcome = try_weights(trainer, weights, "mean", Outcome("best", best))

    assert trainer.evaluated == [7]
    assert outcome == (Outcome("mean", mean) if is_taken else Outcome("best", best))
    assert trainer.model.weight.item() == (7 if is_taken else before)


class OneWeightTrainer:
    """Has a model of one weight, and scores whatever is in it alike."""

    accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    def __init__(self, scores, *, metric="loss", folder="unused"):
        self.model = nn.Linear(1, 1, bias=False)
        self.args = SimpleNamespace(
            metric_for_best_model=metric,
            greater_is_better=metric == "bleu",
            output_dir=folder,
            load_best_model_at_end=False,
        )
        self.scores = scores
        self.evaluated = []

    def evaluate(self, metric_key_prefix):
        self.evaluated.append(self.model.weight.item())
        return {f"{metric_key_prefix}_{name}": value for name, value in self.scores.items()}


@pytest.fixture
def one_weight_run(tmp_path):
    """A run whose checkpoints 8, 9 and 10 hold the weights 1, 2 and 4, and whose means are good."""
    for update, weight in ((8, 1.0), (9, 2.0), (10, 4.0)):
        folder = tmp_path / f"checkpoint-{update}"
        folder.mkdir()
        save_file({"weight": torch.full((1, 1), weight)}, folder / "model.safetensors")
        (folder / "optimizer.pt").write_text("state")
        close_checkpoint(folder)
    return OneWeightTrainer({"loss": 1.0}, folder=tmp_path)


BEST = Outcome("best", {"loss": 2.0})


def test_checkpoint_with_a_flipped_bit_is_left_out_of_the_mean(one_weight_run, tmp_path, capsys):
    flip_bit(tmp_path / "checkpoint-9" / "model.safetensors")
    (tmp_path / "checkpoint-8" / "optimizer.pt").write_text("other")

    outcome = average_weights(one_weight_run, 3, BEST)

    assert outcome.weights == "mean of the last 2 checkpoints"
    assert one_weight_run.model.weight.item() == 2.5
    said = capsys.readouterr().out
    assert "checkpoint-9 is skipped: its model.safetensors has other bytes" in said
    assert "checkpoint-8" not in said


@pytest.mark.parametrize(
    ("last", "is_taken"), [((19.0, 1.9), True), ((21.0, 2.1), True), ((19.0, 2.1), False)]
)
def test_last_weights_are_taken_unless_score_and_loss_are_worse(one_weight_run, last, is_taken):
    one_weight_run.args.metric_for_best_model = "bleu"
    one_weight_run.args.greater_is_better = True
    scores = [(9, 20.0, 2.0), (10, *last)]
    one_weight_run.state = TrainerState(
        global_step=10,
        log_history=[{"step": n, "eval_bleu": bleu, "eval_loss": loss} for n, bleu, loss in scores],
    )
    best = Outcome("best checkpoint", {"step": 9, "bleu": 20.0, "loss": 2.0})
    before = one_weight_run.model.weight.item()

    outcome = prefer_last(one_weight_run, best)

    assert outcome.weights == ("last update" if is_taken else "best checkpoint")
    assert outcome.scores["bleu"] == (last[0] if is_taken else 20.0)
    assert one_weight_run.model.weight.item() == (4 if is_taken else before)
    assert not one_weight_run.evaluated


@pytest.mark.parametrize(
    ("loads_best", "weights", "loss"), [(True, "best checkpoint", 2.0), (False, "last update", 4.0)]
)
def test_outcome_has_the_scores_of_the_weights_in_the_model(loads_best, weights, loss):
    trainer = OneWeightTrainer({})
    trainer.args.load_best_model_at_end = loads_best
    # No checkpoint is of update 8. Update 10 was evaluated again when the run was resumed.
    losses = [(8, 1.0), (9, 2.0), (10, 3.0), (10, 4.0)]
    trainer.state = TrainerState(
        global_step=10,
        best_global_step=8,
        best_model_checkpoint="run/checkpoint-9",
        log_history=[{"eval_loss": loss, "step": step} for step, loss in losses],
    )

    outcome = best_weights(trainer)

    assert (outcome.weights, outcome.scores["loss"]) == (weights, loss)


# The best evaluation


@pytest.mark.parametrize(
    ("metric", "scores", "since"),
    [
        # (score, loss): the score decides, then the loss; the first of equally good ones is best.
        ("bleu", [(20.0, 2.0)], 0),
        ("bleu", [(20.0, 2.0), (21.0, 3.0)], 0),
        ("bleu", [(20.0, 2.0), (19.0, 1.0), (19.5, 0.5)], 2),
        ("bleu", [(20.0, 2.0), (20.0, 1.0)], 0),
        ("bleu", [(20.0, 2.0), (20.0, 2.0)], 1),
        # A score near 0 is chance.
        ("bleu", [(0.07, 4.31), (0.0, 3.23), (0.0, 2.30)], 0),
        ("bleu", [(6.0, 2.0), (4.0, 1.0)], 1),
        ("bleu", [(4.9, 1.0), (5.1, 2.0)], 0),
        # So is an error rate of nearly all.
        ("wer", [(97.0, 3.0), (100.0, 2.0)], 0),
        ("wer", [(30.0, 3.0), (31.0, 2.0)], 1),
        ("loss", [(0.0, 3.0), (0.0, 2.0), (0.0, 2.5)], 1),
    ],
)
def test_evaluations_since_the_best_one_are_counted(metric, scores, since):
    log = [{f"eval_{metric}": score, "eval_loss": loss, "step": 1} for score, loss in scores]
    state = TrainerState(log_history=[{"loss": 9.0}, *log, {"mean_loss": 0.0}])
    is_better_when_greater = metric == "bleu"
    arguments = SimpleNamespace(
        metric_for_best_model=metric, greater_is_better=is_better_when_greater
    )

    assert evaluations_since_best(state, arguments) == since


def test_best_evaluation_may_be_that_of_another_set():
    evaluations = [(9.0, 1.0, 1.0, 1.0), (8.0, 2.0, 1.0, 0.5)]
    names = ("eval_bleu", "eval_loss", "eval_news_bleu", "eval_news_loss")
    log = [dict(zip(names, scores, strict=True)) for scores in evaluations]
    state = TrainerState(log_history=log)
    arguments = SimpleNamespace(metric_for_best_model="news_bleu", greater_is_better=True)

    assert evaluations_since_best(state, arguments) == 0


# The moving average


def test_moving_average_of_bfloat16_weights_is_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    average = MovingAverage(0.999)

    for weight in (1.0, 2.0):
        nn.init.constant_(model.weight, weight)
        average.on_step_end(model=model)

    # In bfloat16 it would have stayed at 1.
    torch.testing.assert_close(average.weights["weight"], torch.full((1, 1), 1.001))
