"""How often a training step asks the device for a number, which empties a GPU's queue."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from synchronisations import Waits


def test_training_step_waits_for_the_device_three_times(tiny_model, batch):
    with Waits() as waits:
        tiny_model.train()(**batch, num_items_in_batch=9).loss.backward()

    # Whether the sources have padding, asked by Transformers in each stack; where the targets are.
    assert waits.names == ["aten::_local_scalar_dense"] * 2 + ["aten::nonzero"]
