"""`benchmarks/finetuning.py`: sizes, and what both contenders have in common."""

import pytest
import torch

from finetuning import KINDS, build, contender


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
