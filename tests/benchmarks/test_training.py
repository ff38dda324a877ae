"""`benchmarks/training.py`: the table, and what is the same for all contenders."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BatchEncoding

import neighbours
import training
from lab import Memory
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


def test_each_contender_has_a_row_with_its_own_speed_and_memory(monkeypatch, capsys):
    class Fake:
        cut = (BATCH,)
        model = SimpleNamespace(config=None)

        def __init__(self, name, size, *_):
            assert size == "tiny"
            self.name = name
            self.seconds = {"vanilla": [9.0, 1.0, 1.0], "m2m100": [1.0, 2.0, 4.0]}[name]

        def run(self):
            return self.seconds.pop(0)

        def estimate(self):
            return 9_000_000 if self.name == "vanilla" else None

    def measure(_, make, name, *__):
        assert make is Fake
        return Memory(1_000_000, {"vanilla": 8_000_000, "m2m100": 5_000_000}[name], 3_000_000)

    monkeypatch.setattr(training, "contender", Fake)
    monkeypatch.setattr(training, "batches", lambda *_: [BATCH])
    monkeypatch.setattr(neighbours, "measure_alone", measure)
    monkeypatch.setattr(neighbours, "training_flops", lambda *_: 6 * 10**12)
    argv = ["training.py", "--corpus", "a", "b", "--sizes", "tiny", "--dtypes", "float32"]
    argv += ["--models", "vanilla", "m2m100", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", argv)

    training.main()

    _, title, _, header, _, *rows = capsys.readouterr().out.splitlines()
    assert "8 tokens in 1 batches, 33.3 % padding" in title
    assert header == f"| {' | '.join(neighbours.TRAINING_COLUMNS)} |"
    assert rows == [
        "| vanilla | 8 | 8-8 | 1.00 | 6 | 1.00 | 4 | 3 | 8 | 1 | 9 |",
        # A third of the speed, and a quarter of the memory.
        "| m2m100 | 3 | 2-4 | 0.33 | 2 | 0.25 | 1 | 3 | 5 | 1 | - |",
    ]


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
