"""What is fast on a CPU: few shapes of products in bfloat16, and weights laid out for few rows."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vanilla_transformer import cpu_vanilla_transformer as cpu
from vanilla_transformer.cpu_vanilla_transformer import WeightLayouts

from ..conftest import Batch, Model, gradients, source_of

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

    assert cpu.ROW_BLOCK in recorder.sizes
    assert not recorder.sizes & ROWS


def test_products_of_an_evaluation_have_their_own_rows(tiny_model, batch):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Recorder() as recorder:
        tiny_model(**batch)

    assert cpu.ROW_BLOCK not in recorder.sizes


def test_products_in_float32_have_their_own_rows(tiny_model, batch, monkeypatch):
    monkeypatch.setattr(cpu, "fill_rows", None)

    gradients(tiny_model, batch)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_gradients_are_those_without_blocks(tiny_model, batch, monkeypatch, label_smoothing):
    tiny_model.config.label_smoothing = label_smoothing
    actual = gradients_under_autocast(tiny_model, batch)
    monkeypatch.setattr(cpu, "ROW_BLOCK", 1)

    expected = gradients_under_autocast(tiny_model, batch)

    # Sums over 64 rows round elsewhere than those over 21; bfloat16 has steps of 2^-8.
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=scale / 64)


@pytest.fixture
def wide_layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(512, 1024).requires_grad_(False)


def layout_of(layer: torch.nn.Linear, layouts: WeightLayouts) -> cpu.WeightForFewRows:
    """The object whose `linear` is the layer's map."""
    return layouts.linear(layer).func.__self__


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_weight_laid_out_for_few_rows_is_the_same_map(wide_layer, rows):
    x = torch.randn(rows, 512)

    torch.testing.assert_close(WeightLayouts().linear(wide_layer)(x), wide_layer(x))


def double_in_place(layer: torch.nn.Linear) -> None:
    layer.weight.mul_(2)


def double_past_the_version(layer: torch.nn.Linear) -> None:
    layer.weight.data.mul_(2)


def change_a_row_past_the_version(layer: torch.nn.Linear) -> None:
    layer.weight.data[1000] = 1.0


def change_columns_past_the_version(layer: torch.nn.Linear) -> None:
    layer.weight.data[:, 1:] *= 2


def replace_data(layer: torch.nn.Linear) -> None:
    layer.weight.data = 2 * layer.weight.data


def replace_weight(layer: torch.nn.Linear) -> None:
    layer.weight = torch.nn.Parameter(2 * layer.weight, requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        double_in_place,
        double_past_the_version,
        change_a_row_past_the_version,
        change_columns_past_the_version,
        replace_data,
        replace_weight,
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_weight_is_laid_out_anew_when_it_changes(wide_layer, rows, change):
    layouts, x = WeightLayouts(), torch.randn(rows, 512)
    layouts.linear(wide_layer)(x)

    change(wide_layer)

    torch.testing.assert_close(layouts.linear(wide_layer)(x), wide_layer(x))


def test_weight_is_laid_out_once(wide_layer):
    layouts = WeightLayouts()

    assert layout_of(wide_layer, layouts) is layout_of(wide_layer, layouts)


@pytest.fixture
def laid_out_model(tiny_model, batch, monkeypatch) -> Model:
    """A model that has generated, and laid out even its small weights."""
    monkeypatch.setattr(cpu, "FEWEST_ENTRIES", 1)
    tiny_model.generate(**source_of(batch), max_length=4)
    return tiny_model


def count_layouts(model: Model) -> int:
    return len(model.weight_layouts._laid_out)


def test_model_lays_each_weight_out_once(laid_out_model, batch):
    before = dict(laid_out_model.weight_layouts._laid_out)

    laid_out_model.generate(**source_of(batch), max_length=4)

    after = dict(laid_out_model.weight_layouts._laid_out)
    # qkv_proj, q_proj, kv_proj, fc1, fc2 and two out_proj of each layer, and lm_head.
    assert len(before) == 7 * len(laid_out_model.model.decoder.layers) + 1
    assert all(after[module] is before[module] for module in before)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_copy_of_a_model_has_no_layouts(laid_out_model, copied):
    assert count_layouts(laid_out_model) > 0
    assert count_layouts(copied(laid_out_model)) == 0


def test_training_frees_the_layouts(laid_out_model):
    laid_out_model.eval()
    assert count_layouts(laid_out_model) > 0

    laid_out_model.train()

    assert count_layouts(laid_out_model) == 0


def test_layouts_are_not_saved(laid_out_model):
    parameters = {name for name, _ in laid_out_model.named_parameters(remove_duplicate=False)}

    assert laid_out_model.state_dict().keys() == parameters


def test_weights_of_another_kind_make_their_own_products():
    class Quantised(nn.Parameter):
        """As torchao's, whose products are not those of torch."""

    module = nn.Linear(3, 5)
    module.weight = Quantised(module.weight.data)

    assert WeightLayouts().linear(module) == module.forward
