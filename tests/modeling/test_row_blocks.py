"""Matrix products in bfloat16 on a CPU: few shapes in training, and the same results."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer.modeling import kernels_vanilla_transformer as kernels

from ..conftest import Batch, Model, gradients

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Rows that the layers, and the loss behind them, have without a block: tokens of the padded sources
# and targets of `batch`, and its targets.
ROWS = {21, 15, 12}


class Recorder(TorchDispatchMode):
    """Notes the sizes of matrices that are multiplied in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function in PRODUCTS and args[-1].dtype == torch.bfloat16:
            self.sizes.update(size for matrix in args[-2:] for size in matrix.shape)
        return function(*args, **kwargs or {})


def gradients_under_autocast(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return gradients(model, batch)


def test_products_of_a_training_step_have_whole_blocks_of_rows(tiny_model, batch):
    with Recorder() as recorder:
        gradients_under_autocast(tiny_model, batch)

    assert kernels.ROW_BLOCK in recorder.sizes
    assert not recorder.sizes & ROWS


def test_products_of_an_evaluation_have_their_own_rows(tiny_model, batch):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Recorder() as recorder:
        tiny_model(**batch)

    assert kernels.ROW_BLOCK not in recorder.sizes


def test_products_in_float32_have_their_own_rows(tiny_model, batch, monkeypatch):
    monkeypatch.setattr(kernels, "fill_rows", None)

    gradients(tiny_model, batch)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_are_those_without_blocks(tiny_model, batch, monkeypatch, label_smoothing):
    tiny_model.config.label_smoothing = label_smoothing
    actual = gradients_under_autocast(tiny_model, batch)
    monkeypatch.setattr(kernels, "ROW_BLOCK", 1)

    expected = gradients_under_autocast(tiny_model, batch)

    # Sums over 64 rows round elsewhere than those over 21; bfloat16 has steps of 2^-8.
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=scale / 64)
