"""Dropout and weights that are fast on a CPU."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from vanilla_transformer import fast_layers_vanilla_transformer as fast_layers
from vanilla_transformer.fast_layers_vanilla_transformer import Dropout, WeightLayouts
from vanilla_transformer.modules_vanilla_transformer import direct_call

from ..models import Model, source_of


@pytest.fixture
def wide_layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(512, 1024).requires_grad_(False)


def change_a_row_past_the_version(layer: torch.nn.Linear) -> None:
    layer.weight.data[1000] = 1.0


def change_columns_past_the_version(layer: torch.nn.Linear) -> None:
    layer.weight.data[:, 1:] *= 2


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "a row past the version": change_a_row_past_the_version,
    "columns past the version": change_columns_past_the_version,
    "data": lambda layer: setattr(layer.weight, "data", 2 * layer.weight.data),
    "weight": lambda layer: setattr(
        layer, "weight", nn.Parameter(2 * layer.weight, requires_grad=False)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("rows", [1, 2])
def test_weight_is_laid_out_anew_when_it_changes(wide_layer, rows, change):
    layouts, x = WeightLayouts(), torch.randn(rows, 512)
    layouts.linear(wide_layer)(x)

    change(wide_layer)

    torch.testing.assert_close(layouts.linear(wide_layer)(x), wide_layer(x))


@pytest.fixture
def laid_out_model(tiny_model, batch, monkeypatch) -> Model:
    """A model that has generated, and laid out even its small weights."""
    monkeypatch.setattr(fast_layers, "FEWEST_ENTRIES", 1)
    tiny_model.generate(**source_of(batch), max_length=4)
    return tiny_model


def count_layouts(model: Model) -> int:
    return len(model.model.backend.layouts._laid_out)


def test_copies_of_a_model_have_no_layouts(laid_out_model):
    assert count_layouts(laid_out_model) > 0
    assert count_layouts(copy.deepcopy(laid_out_model)) == 0
    assert count_layouts(pickle.loads(pickle.dumps(laid_out_model))) == 0


def test_weights_of_another_kind_make_their_own_products():
    class Quantised(nn.Parameter):
        """As torchao's, whose products are not those of torch."""

    module = nn.Linear(3, 5)
    module.weight = Quantised(module.weight.data)

    assert direct_call(module, WeightLayouts().linear) == module.forward


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(101, 203), (5, 40_009)])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(p, shape):
    torch.manual_seed(0)

    dropped = Dropout(p)(torch.ones(shape))

    kept = dropped != 0
    # Five standard deviations.
    play = 5 * math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.float().mean() - (1 - p)) < play
    # Rates are multiples of 2^-16.
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / (1 - p)))


def test_dropout_drops_entries_independently():
    torch.manual_seed(0)

    kept = (Dropout(0.5)(torch.ones(10_007)) != 0).double()

    # Correlation with the mask shifted by each distance, all at once. Several entries share a
    # random draw, so a slip would show at some distance; chance stays below six deviations.
    spectrum = torch.fft.rfft(kept - kept.mean()).abs().square()
    correlation = torch.fft.irfft(spectrum, n=len(kept)) / len(kept) / kept.var()
    assert correlation[1:].abs().max() < 6 / math.sqrt(len(kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_passes_the_gradient_of_kept_entries_only(dtype):
    x = torch.ones(13, 17, dtype=dtype, requires_grad=True)

    dropped = Dropout(0.3)(x)
    dropped.backward(torch.ones_like(x))

    assert dropped.dtype == dtype
    assert torch.equal(x.grad, dropped.detach())
    assert 0 < dropped.count_nonzero() < x.numel()
