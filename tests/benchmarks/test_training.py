"""`benchmarks/training.py`: what its cells count, and what is the same for all contenders."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BatchEncoding

import neighbours
import training
from neighbours import Training, build, training_flops

from ..models import build_variant

BATCH = BatchEncoding(
    {
        "input_ids": torch.tensor([[5, 6, 2, 0], [7, 2, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "labels": torch.tensor([[8, 2], [2, -100]]),
    }
)


SIZES = {
    "vocab_size": 50,
    "d_model": 8,
    "dropout": 0.0,
    **{f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "ffn_dim")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}


def test_flops_are_those_that_torch_counts():
    model = build_variant()
    # On a CPU its counter knows no fused attention.
    model.set_attn_implementation("eager")
    ids = torch.full((2, 7), 5)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :5]}

    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False)

    assert training_flops(model.config, [batch]) == 3 * counter.get_total_flops()


def test_state_is_four_numbers_of_four_bytes_for_each_trained_parameter():
    def make():
        model = build("vanilla", **SIZES)
        model.lm_head.weight.requires_grad = False
        return Training(model, [BATCH])

    trained = sum(p.numel() for p in make().model.parameters() if p.requires_grad)
    assert neighbours._run_steps(make) == 16 * trained


@pytest.mark.slow
# Of torch's compiler.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_models_train_on_random_tokens_in_float32_and_compiled(monkeypatch, capsys):
    monkeypatch.setattr(training, "WMT_VOCABULARY", 200)
    monkeypatch.setattr(training, "COMPILER", "eager")
    argv = "training.py --sizes tiny --tokens 400 --batches 1 --rounds 1 --dtypes float32"
    argv += " --models vanilla m2m100 --compile --profile"
    monkeypatch.setattr(sys, "argv", argv.split())

    training.main()

    lines = capsys.readouterr().out.splitlines()
    names = [line.split(" | ")[0] for line in lines if line.count(" | ") == 10]
    assert names == ["| model", "| ---", "| vanilla", "| m2m100", "| vanilla, compiled"]
    assert any(line.startswith("| gaps |") for line in lines)
