"""Gradients of the loss: who owns them, and how those of a tied matrix are summed."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vanilla_transformer import fast_loss_vanilla_transformer
from vanilla_transformer.fast_loss_vanilla_transformer import (
    LossTerms,
    loss_sum,
    projected_loss_sum,
)
from vanilla_transformer.modeling_vanilla_transformer import Backend

from ..models import TWO_TABLES, UNTIED, build_variant


@pytest.fixture
def projection() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 37, dtype=torch.float64)


def loss_of(projection: nn.Linear) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A loss and what it depends on."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(3, 5, 24, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(37, (3, 5), generator=generator)
    loss = projected_loss_sum(projection, states, labels, LossTerms(0.1))
    return loss, (states, projection.weight, projection.bias)


def test_retained_graph_gives_the_gradients_again(projection):
    loss, inputs = loss_of(projection)

    first = torch.autograd.grad(2 * loss, inputs, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(3 * loss, inputs)

    for one, copy, other in zip(first, kept, second, strict=True):
        assert torch.equal(one, copy)
        torch.testing.assert_close(other, one * 1.5, rtol=1e-12, atol=0)


every_term = pytest.mark.parametrize("terms", [LossTerms(), LossTerms(0.1), LossTerms(0.1, 2.0)])


def reference(weight: Tensor, states: Tensor, labels: Tensor, smoothing: float) -> list[Tensor]:
    """Gradients of the mean loss in float64, for hidden states and weight."""
    inputs = [one.detach().double().requires_grad_() for one in (states, weight)]
    logits = inputs[0] @ inputs[1].T
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing
    )
    return list(torch.autograd.grad(loss, inputs))


def emulate_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with float32 results, which torch has on CUDA only; not its kernels."""
    product = torch.mm

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return product(a, b, **kwargs) if out_dtype is None else product(a.float(), b.float())

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(fast_loss_vanilla_transformer, "sums_in_float32", lambda device: True)


def assert_gradients_are_those_of_float64(projection, positions, terms, dtype, **compiler) -> None:
    states = torch.randn(2, positions, 24, requires_grad=True)
    labels = torch.randint(37, (1, positions)).expand(2, -1)
    wide = deepcopy(projection).double()
    exact_states = states.detach().double().requires_grad_()
    exact = loss_sum(wide(exact_states), labels, terms)
    expected = torch.autograd.grad(exact, (exact_states, *wide.parameters()))

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        total = projected_loss_sum(projection, states, labels, terms, **compiler)
    found = torch.autograd.grad(total, (states, *projection.parameters()))

    # Eight bits of mantissa.
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    assert (total - exact).abs() < bound * exact
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < bound * other.norm()


@every_term
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_float64_with_a_short_chunk(monkeypatch, terms, dtype):
    # The last chunk is short.
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", 16)
    torch.manual_seed(0)
    assert_gradients_are_those_of_float64(nn.Linear(24, 37), 45, terms, dtype)


@pytest.mark.parametrize("weights", [torch.float32, torch.float16])
def test_scaled_float16_gradients_are_those_of_float64(weights):
    # As a gradient scaler begins.
    loss_scale = 2.0**16
    generator = torch.Generator().manual_seed(0)
    # Most probabilities are below 1e-7, as a trained model gives to most of its 37,000 ids.
    states = (4 * torch.randn(1, 16, 8, generator=generator)).half().to(weights)
    weight = torch.randn(37_000, 8, generator=generator).half().to(weights)
    labels = torch.randint(37_000, (1, 16), generator=generator)
    projection = nn.Linear(8, 37_000, bias=False)
    projection.weight = nn.Parameter(weight)
    states.requires_grad_()
    expected_states, expected_weight = reference(weight, states, labels, 0.0)

    with torch.autocast("cpu", dtype=torch.float16, enabled=weights == torch.float32):
        loss = projected_loss_sum(projection, states, labels) / 16
    grad_states, grad_weight = torch.autograd.grad(loss * loss_scale, (states, projection.weight))

    assert (grad_states / loss_scale - expected_states).norm() < 2**-6 * expected_states.norm()
    assert grad_weight.dtype == weights
    norms = expected_weight.norm(dim=1)
    errors = (grad_weight.double() / loss_scale - expected_weight).norm(dim=1)
    # Unscaled, the gradients of these logits have a bit or two of mantissa.
    is_small = (norms > 1e-7) & (norms < 1e-6)
    assert is_small.sum() > 100
    # Logits are rounded to float16 too.
    assert (errors < 2**-5 * norms)[is_small].all()


@every_term
@pytest.mark.parametrize("has_bias", [False, True])
def test_entries_that_fill_up_a_row_change_no_gradient(monkeypatch, terms, has_bias):
    emulate_cuda(monkeypatch)
    widths = []
    compute = fast_loss_vanilla_transformer._loss_and_gradient

    def watch(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        widths.append(logits.shape[1])
        return compute(logits, *others)

    monkeypatch.setattr(fast_loss_vanilla_transformer, "_loss_and_gradient", watch)
    torch.manual_seed(0)
    projection = nn.Linear(24, 37, bias=has_bias)
    assert_gradients_are_those_of_float64(projection, 9, terms, torch.bfloat16)

    assert set(widths) == {64}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_loss_is_one_graph_with_the_gradients_of_float64(monkeypatch, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    emulate_cuda(monkeypatch)
    graphs = CompileCounterWithBackend(backend)
    torch.manual_seed(0)
    projection = nn.Linear(24, 37)
    # Chunks of one size, then of others, the last of them ragged.
    for rows, positions in ((8, 16), (6, 20), (1000, 45)):
        monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", rows)
        assert_gradients_are_those_of_float64(
            projection, positions, LossTerms(0.1, 2.0), torch.bfloat16, compiler=graphs
        )
    assert graphs.frame_count == 1


SMOOTH = {"activation_function": "gelu"}
# Changes of the config, and R-Drop's weight. Flash attention on a CPU has no second derivative.
SECOND = {
    "tied": ({}, 0.0),
    "untied_bias": ({**UNTIED, "lm_head_bias": True}, 1.0),
    "two_tables": (TWO_TABLES, 0.0),
    "label_smoothing": ({"label_smoothing": 0.1}, 1.0),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_need_all_logits(batch, name):
    changes, r_drop_alpha = SECOND[name]
    model = build_variant(**SMOOTH, **changes).double().train()
    model.set_attn_implementation("eager")
    # The second half repeats the first, as R-Drop wants it.
    batch = {name: tensor[[0, 1, 0, 1]] for name, tensor in batch.items()}
    batch["r_drop_alpha"] = r_drop_alpha
    parameters = list(model.parameters())

    def slope(**settings: bool) -> Tensor:
        gradients = torch.autograd.grad(
            model(**batch, **settings).loss, parameters, create_graph=True
        )
        return sum(gradient.square().sum() for gradient in gradients)

    with pytest.raises(RuntimeError, match="Call the model with `return_logits=True`"):
        slope()
    found = torch.autograd.grad(slope(return_logits=True), parameters)

    model.config.fast, model.model.backend = False, Backend()
    torch.testing.assert_close(found, torch.autograd.grad(slope(), parameters))


def test_transforms_of_torch_compute_the_gradients_of_training(batch):
    # `vmap` refuses Transformers' look at the values of a mask.
    del batch["attention_mask"]
    model = build_variant(**SMOOTH, **TWO_TABLES).double().train()
    model.set_attn_implementation("eager")
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    expected = torch.autograd.grad(model(**batch).loss, list(model.parameters()))

    def loss_of(weights: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, weights, (), batch).loss
        return loss

    actual = torch.func.grad(loss_of)(weights, batch)
    rows = {name: tensor[:, None] for name, tensor in batch.items()}
    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, rows)

    last = torch.func.grad(loss_of)(weights, {name: one[2] for name, one in rows.items()})
    for gradient, name in zip(expected, weights, strict=True):
        torch.testing.assert_close(actual[name], gradient)
        torch.testing.assert_close(each[name][2], last[name])
