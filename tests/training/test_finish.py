"""The weights that a run ends with: the best checkpoint, averages, or the start."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import TrainerState

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.training import finish
from vanilla_transformer_tools.training.checkpoints import close_checkpoint
from vanilla_transformer_tools.training.finish import average_checkpoints, choose_weights
from vanilla_transformer_tools.training.ranking import Ranking

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


class OneWeightTrainer:
    """Has a model of one weight, whose validation scores are made up by a test."""

    def __init__(self, plan, folder, log, mean, metric):
        self.plan = plan
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, 4.0)
        self.args = SimpleNamespace(
            metric_for_best_model=metric,
            greater_is_better=metric == "bleu",
            output_dir=str(folder),
            eval_strategy="steps",
        )
        self.state = TrainerState(global_step=10, log_history=log)
        self.ranking = Ranking(self.args, with_start=True)
        self.moving_average = None
        self.mean, self.evaluated = mean, []

    def evaluate(self, metric_key_prefix):
        self.evaluated.append(self.model.weight.item())
        return {f"{metric_key_prefix}_{name}": value for name, value in self.mean.items()}


@pytest.fixture
def choose(tmp_path):
    """Chooses among checkpoints 8, 9 and 10, which hold the weights 1, 2 and 4, and their mean.

    Scores are of updates: score and loss. Returns the name, the weight and what was evaluated.
    """
    for update, weight in ((8, 1.0), (9, 2.0), (10, 4.0)):
        folder = tmp_path / f"checkpoint-{update}"
        folder.mkdir()
        save_file({"weight": torch.full((1, 1), weight)}, folder / "model.safetensors")
        close_checkpoint(folder)

    def run(scores, mean=(0.0, 9.0), *, metric="bleu", averaged=1, minutes=None, **changes):
        log = [{"step": n, f"eval_{metric}": s, "eval_loss": loss} for n, s, loss in scores]
        plan = SimpleNamespace(
            folder=tmp_path,
            averaged=averaged,
            arguments=SimpleNamespace(load_best_model_at_end=True),
            settings=SimpleNamespace(minutes=minutes, moving_average=None, init_from="base"),
        )
        scores_of_mean = {metric: mean[0], "loss": mean[1]}
        trainer = OneWeightTrainer(plan, tmp_path, log, scores_of_mean, metric)
        chosen = choose_weights(trainer, **changes)
        return chosen.name, trainer.model.weight.item(), trainer.evaluated

    return run


MEAN = "mean of the last 2 checkpoints"


@pytest.mark.parametrize(
    ("metric", "best", "mean", "is_taken"),
    [
        ("bleu", (30.0, 2.0), (30.1, 2.1), True),
        ("bleu", (30.0, 2.0), (30.0, 2.1), False),
        ("bleu", (30.0, 2.0), (29.9, 1.9), True),
        ("bleu", (30.0, 2.0), (29.9, 2.0), False),
        ("bleu", (30.0, 2.0), (40.0, math.nan), False),
        ("wer", (10.0, 2.0), (9.9, 2.1), True),
    ],
)
def test_mean_is_taken_if_its_score_or_its_loss_is_better(choose, metric, best, mean, is_taken):
    worse = (best[0] + (-9 if metric == "bleu" else 9), 3.0)

    name, weight, evaluated = choose([(9, *best), (10, *worse)], mean, metric=metric, averaged=2)

    assert evaluated == [3.0]
    assert (name, weight) == ((MEAN, 3.0) if is_taken else ("best checkpoint", 2.0))


def test_checkpoint_with_a_flipped_bit_is_left_out(choose, tmp_path, capsys):
    flip_bit(tmp_path / "checkpoint-9" / "model.safetensors")
    scores = [(8, 30.0, 2.0), (9, 31.0, 1.9), (10, 20.0, 3.0)]

    assert choose(scores)[:2] == ("best checkpoint", 1.0)
    assert choose(scores, (40.0, 1.0), averaged=3)[:2] == (MEAN, 2.5)
    assert "checkpoint-9 is skipped: its model.safetensors has other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("last", "is_taken"), [((19.0, 1.9), True), ((21.0, 2.1), True), ((19.0, 2.1), False)]
)
def test_last_weights_of_some_minutes_are_taken_unless_both_are_worse(choose, last, is_taken):
    name, weight, _ = choose([(9, 20.0, 2.0), (10, *last)], minutes=1.0)

    expected = {("last update", 4.0), ("best checkpoint", 4.0)}
    assert ((name, weight) in expected) == is_taken
    assert choose([(9, 20.0, 2.0), (10, *last)], minutes=1.0, compares=False)[1] in (2.0, 4.0)


def test_start_is_a_candidate(choose, monkeypatch):
    weights = {"weight": torch.full((1, 1), 7.0)}
    saved = SimpleNamespace(state_dict=lambda: weights)
    monkeypatch.setattr(finish, "load_model", lambda *_, **kwargs: saved)

    better = choose([(0, 50.0, 1.0), (9, 20.0, 2.0), (10, 19.0, 2.1)])
    worse = choose([(0, 20.0, 3.0), (9, 50.0, 2.0), (10, 19.0, 2.1)])

    assert better[:2] == ("start, which no update made better", 7.0)
    assert worse[:2] == ("best checkpoint", 2.0)
    # Random weights are none.
    ranking = Ranking(SimpleNamespace(metric_for_best_model="loss", greater_is_better=False))
    assert not ranking.evaluations(TrainerState(log_history=[{"step": 0, "eval_loss": 0.1}]))


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
    state = TrainerState(log_history=[{"loss": 9.0, "step": 1}, *log, {"mean_loss": 0.0}])
    arguments = SimpleNamespace(metric_for_best_model=metric, greater_is_better=metric == "bleu")

    assert Ranking(arguments).since_best(state) == since
