"""`benchmarks/finetuning.py`: its table, and what both contenders have in common."""

import sys

import pytest
import torch

from ..support.documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import finetuning
from finetuning import KINDS, build, contender
from lab import Memory


def test_speeds_and_memory_are_compared_with_the_class_of_transformers():
    seconds = {"in-tree": [6.0, 1.0, 7.0], "vanilla": [3.0, 2.0, 10.0]}
    used = {
        "in-tree": Memory(start=10_000_000, peak=100_000_000, result=30_000_000),
        "vanilla": Memory(start=20_000_000, peak=65_000_000, result=30_000_000),
    }

    cells = finetuning.rows(1200, seconds, used)

    assert cells == {
        "in-tree": ["200", "171-1,200", "1.00", "60", "1.00", "30"],
        # Twice as fast, with a quarter of the memory.
        "vanilla": ["400", "120-600", "2.00", "15", "0.25", "30"],
    }


def test_sizes_are_those_of_the_models_that_people_have():
    for size, count in (("opus", 74_000_000), ("nllb", 321_000_000)):
        with torch.device("meta"):
            model = build(size, "in-tree")
        assert model.num_parameters() == pytest.approx(count, rel=0.01)


def test_both_contenders_have_the_same_weights_dropout_and_batches():
    theirs, ours = (contender("minute", kind, pairs=3, batches=2) for kind in KINDS)

    assert torch.equal(theirs.model.model.shared.weight, ours.model.model.shared.weight)
    assert theirs.model.config.dropout == ours.model.config.dropout > 0
    assert len(theirs.cut) == len(ours.cut) == 2
    for batch, other in zip(theirs.cut, ours.cut, strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in batch)
        assert len(batch["labels"]) == 3
