"""`benchmarks/training.py`: the table, and what is the same for all contenders."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import BatchEncoding

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import neighbours
import training
from lab import Memory
from neighbours import Training, build, padding_of, tokens_of

BATCH = BatchEncoding(
    {
        "input_ids": torch.tensor([[5, 6, 2, 0], [7, 2, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "labels": torch.tensor([[8, 2], [2, -100]]),
    }
)


def test_tokens_and_padding_are_counted_on_both_sides():
    assert tokens_of([BATCH, BATCH]) == 16
    assert padding_of([BATCH]) == pytest.approx(4 / 12)


SIZES = {
    "vocab_size": 50,
    "d_model": 8,
    "dropout": 0.0,
    **{f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "ffn_dim")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}


@pytest.mark.parametrize("family", ["vanilla", "m2m100"])
def test_label_smoothing_is_the_same_for_all(family):
    trained = Training(build(family, **SIZES), [BATCH], label_smoothing=0.1)
    logits = trained.model.eval()(**BATCH).logits.log_softmax(-1)[BATCH["labels"] >= 0]
    trained.model.train()
    labels = BATCH["labels"][BATCH["labels"] >= 0]

    smoothed = -0.9 * logits[range(3), labels].mean() - 0.1 * logits.mean()

    torch.testing.assert_close(trained.loss(BATCH), smoothed)


def test_round_updates_the_weights_once_for_each_batch():
    trained = Training(build("vanilla", **SIZES), [BATCH, BATCH])

    assert trained.run() > 0
    assert {int(state["step"]) for state in trained.optimizer.state.values()} == {2}


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

        def __init__(self, name, size, *_):
            assert size == "tiny"
            self.seconds = {"vanilla": [9.0, 1.0, 1.0], "m2m100": [1.0, 2.0, 4.0]}[name]

        def run(self):
            return self.seconds.pop(0)

    def measure(_, make, name, *__):
        assert make is Fake
        return Memory(1_000_000, {"vanilla": 8_000_000, "m2m100": 5_000_000}[name], 3_000_000)

    monkeypatch.setattr(training, "contender", Fake)
    monkeypatch.setattr(training, "batches", lambda *_: [BATCH])
    monkeypatch.setattr(neighbours, "measure_alone", measure)
    argv = ["training.py", "--corpus", "a", "b", "--sizes", "tiny", "--dtypes", "float32"]
    argv += ["--models", "vanilla", "m2m100", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", argv)

    training.main()

    _, title, _, header, _, *rows = capsys.readouterr().out.splitlines()
    assert "8 tokens in 1 batches, 33.3 % padding" in title
    assert header.startswith("| model | tokens/s | range | speed | growth | growth MB | state MB |")
    assert rows == [
        "| vanilla | 8 | 8-8 | 1.00 | 1.00 | 4 | 3 | 8 | 1 |",
        # A third of the speed, and a quarter of the memory.
        "| m2m100 | 3 | 2-4 | 0.33 | 0.25 | 1 | 3 | 5 | 1 |",
    ]


def test_sizes_of_heads_are_multiples_of_the_default():
    wide, default = (
        training.contender(name, "tiny", 50, [BATCH]).model.config
        for name in ("d_k doubled", "default")
    )

    assert wide.d_k == 2 * default.d_model // default.encoder_attention_heads
