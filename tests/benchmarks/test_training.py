"""`benchmarks/training.py`: the table, and what is the same for all contenders."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BatchEncoding

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import corpora
import matrix_products
import memory
import neighbours
import training
from corpora import batches
from matrix_products import MatrixProducts
from memory import Memory
from neighbours import (
    Training,
    build,
    our_variants,
    padding_of,
    run_steps,
    sinusoids,
    tokens_of,
)

BATCH = BatchEncoding(
    {
        "input_ids": torch.tensor([[5, 6, 2, 0], [7, 2, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "labels": torch.tensor([[8, 2], [2, -100]]),
    }
)


def test_growth_is_what_training_adds_to_weights_gradients_and_adam():
    used = Memory(start=10_000_000, peak=100_000_000, result=30_000_000)

    cells = training.memory_cells(used)

    assert training.COLUMNS[-4:] == ("growth MB", "peak MB", "start MB", "state MB")
    assert cells == ["60", "100", "10", "30"]


@pytest.mark.parametrize("products", [False, True])
def test_each_contender_has_a_row_with_its_own_time_and_memory(monkeypatch, capsys, products):
    class Fake:
        def __init__(self, family, *_):
            self.seconds = {"vanilla": [9.0, 1.0, 1.0], "m2m100": [1.0, 2.0, 4.0]}[family]

        def run(self):
            return self.seconds.pop(0)

    def measure(work, family, *_):
        assert work is run_steps
        return Memory(1_000_000, {"vanilla": 5_000_000, "m2m100": 8_000_000}[family], 0)

    class FakeProducts:
        def __init__(self, work):
            assert isinstance(work.__self__, Fake)

        def run(self):
            return 0.5

    monkeypatch.setattr(neighbours, "Training", Fake)
    monkeypatch.setattr(matrix_products, "MatrixProducts", FakeProducts)
    monkeypatch.setattr(corpora, "batches", lambda *_: [BATCH])
    monkeypatch.setattr(memory, "measure_alone", measure)
    models = {"vanilla": ("vanilla", {}), "m2m100": ("m2m100", {})}
    options = Namespace(tokens=1, batches=1, unsorted=False, corpus=[], label_smoothing=0)
    vars(options).update(compile=False, rounds=2, products=products)

    training.print_table("tiny", "float32", models, options)

    _, title, _, _, *rows = capsys.readouterr().out.splitlines()
    assert "8 tokens in 1 batches, 33.3 % padding" in title
    assert rows == [
        "| vanilla | 8 | 8-8 | 1.00 | 4 | 5 | 1 | 0 |",
        "| m2m100 | 3 | 2-4 | 3.00 | 7 | 8 | 1 | 0 |",
        *(f"| {name}, products | 16 | 16-16 | 0.50 {'| - ' * 4}|" for name in models if products),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_alone_are_those_of_the_steps(dtype):
    contender = Training("vanilla", {}, "tiny", 50, dtype, 0.0, None, [BATCH, BATCH])
    products = MatrixProducts(contender.run)
    steps, alone = FlopCounterMode(display=False), FlopCounterMode(display=False)

    with steps:
        contender.run()
    with alone:
        seconds = products.run()

    counted = {key: n for key, n in steps.get_flop_counts()["Global"].items() if "mm" in str(key)}
    assert alone.get_flop_counts()["Global"] == counted
    assert seconds > 0


def test_products_have_the_layouts_of_the_steps():
    left, right = torch.randn(3, 4).T, torch.randn(1, 5).expand(3, 5)
    total = torch.zeros(4, 5)
    products = MatrixProducts(lambda: total.addmm_(left, right))

    [(function, operands, named)] = products._calls

    assert function is torch.ops.aten.addmm_.default
    assert [value.stride() for value in operands] == [(5, 1), (1, 4), (0, 1)]
    assert [value.shape for value in operands] == [total.shape, left.shape, right.shape]
    assert named == {}


def test_tokens_and_padding_are_counted_on_both_sides():
    assert tokens_of([BATCH, BATCH]) == 16
    assert padding_of([BATCH]) == pytest.approx(4 / 12)


@pytest.mark.parametrize("unsorted", [False, True])
def test_batches_have_the_budget_in_tokens(tmp_path, unsorted):
    for side in "ab":
        lines = "".join(f"{'word ' * (1 + n % 9)}{side}\n" for n in range(200))
        (tmp_path / side).write_text(lines, encoding="utf-8")
    corpus = [str(tmp_path / side) for side in "ab"]

    cut = batches(corpus, 280, 300, count=3, unsorted=unsorted)

    assert len(cut) == 3
    sizes = [batch["input_ids"].numel() + batch["labels"].numel() for batch in cut]
    assert max(sizes) <= 300 or unsorted
    assert 0.6 * 900 < tokens_of(cut) < 1.3 * 900


@pytest.mark.parametrize("family", ["vanilla", "m2m100", "marian"])
def test_positions_are_laid_out_as_in_each_family(family):
    model = build(
        family,
        vocab_size=11,
        d_model=6,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=4,
        decoder_ffn_dim=4,
    )
    embed = model.model.encoder.embed_positions if family != "vanilla" else None
    expected = sinusoids(family, 5, 6)

    if family == "vanilla":
        # Section 3.5: sine and cosine of one angle side by side.
        angle = torch.tensor(3 / 10_000 ** (2 / 6), dtype=torch.float64)
        torch.testing.assert_close(expected[3, 2:4], torch.stack((angle.sin(), angle.cos())))
    else:
        found = embed.weights[1:6] if family == "m2m100" else embed.weight[:5]
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["vanilla", "m2m100"])
def test_label_smoothing_is_the_same_for_all(family):
    contender = Training(family, {"dropout": 0.0}, "tiny", 50, "float32", 0.1, None, [BATCH])
    logits = contender.model.eval()(**BATCH).logits.log_softmax(-1)[BATCH["labels"] >= 0]
    contender.model.train()
    labels = BATCH["labels"][BATCH["labels"] >= 0]

    smoothed = -0.9 * logits[range(3), labels].mean() - 0.1 * logits.mean()

    torch.testing.assert_close(contender.loss(BATCH), smoothed)


def test_state_is_four_numbers_of_four_bytes_for_each_parameter():
    setting = ("tiny", 50, "float32", 0.0, None, [BATCH])

    state = run_steps("vanilla", {}, *setting)

    assert state == 16 * Training("vanilla", {}, *setting).model.num_parameters()


def test_variants_of_head_sizes_are_twice_the_default():
    _, fields = our_variants("base")["d_k and d_v doubled"]

    assert fields == {"d_k": 128, "d_v": 128}
