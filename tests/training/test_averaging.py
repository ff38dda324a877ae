"""The mean of checkpoints: each tensor once, whatever files they lie in."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.training.averaging import (
    Outcome,
    average_checkpoints,
    try_weights,
)


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
        ({"tie_word_embeddings": False}, "'lm_head.weight' in only one of"),
        (
            {"encoder_ffn_dim": 30},
            r"'model.encoder.layers.0.fc1.(weight|bias)' must have one shape",
        ),
    ):
        config = type(tiny_config)(**{**tiny_config.to_dict(), **change})
        other = tmp_path / "other"
        VanillaTransformerForConditionalGeneration(config).save_pretrained(other)

        with pytest.raises(ValueError, match=fault):
            average_checkpoints([folders[0], other])


def test_average_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no checkpoint to average"):
        average_checkpoints([])


@pytest.mark.parametrize(
    ("metric", "best", "mean", "is_taken"),
    [
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 30.1, "loss": 2.1}, True),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 30.0, "loss": 2.0}, True),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 29.9, "loss": 1.9}, True),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 29.9, "loss": 2.0}, False),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 40.0, "loss": math.nan}, False),
        ("bleu", {"bleu": 30.0, "loss": 2.0}, {"bleu": 29.9, "loss": math.nan}, False),
        ("loss", {"loss": 2.0}, {"loss": math.nan}, False),
        ("wer", {"wer": 10.0, "loss": 2.0}, {"wer": 9.9, "loss": 2.1}, True),
        ("wer", {"wer": 10.0, "loss": 2.0}, {"wer": 10.1, "loss": 2.1}, False),
    ],
)
def test_averaged_weights_are_taken_unless_both_score_and_loss_are_worse(
    metric, best, mean, is_taken
):
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    evaluated = []

    def evaluate(metric_key_prefix):
        evaluated.append(model.weight.item())
        return {f"{metric_key_prefix}_{name}": value for name, value in mean.items()}

    trainer = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda given: given),
        args=SimpleNamespace(
            metric_for_best_model=metric, greater_is_better=metric == "bleu", output_dir="unused"
        ),
        is_fsdp_enabled=False,
        is_deepspeed_enabled=False,
        evaluate=evaluate,
    )
    weights = {"weight": torch.full((1, 1), 7.0)}

    outcome = try_weights(trainer, weights, "mean", Outcome("best", best))

    assert evaluated == [7]
    assert outcome == (Outcome("mean", mean) if is_taken else Outcome("best", best))
    assert model.weight.item() == (7 if is_taken else before)
