"""R-Drop against its formula, in float64 and from logits alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    fast_loss_vanilla_transformer,
)
from vanilla_transformer.fast_loss_vanilla_transformer import projected_loss_sum
from vanilla_transformer.loss_vanilla_transformer import LossTerms, loss_sum
from vanilla_transformer_tools.training.trainer import r_drop

ALPHA = 3.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", 4)


@pytest.fixture
def dropping_model(tiny_config):
    """A model in training, whose two passes differ, and which smooths its labels."""
    tiny_config.dropout, tiny_config.label_smoothing = 0.4, 0.1
    torch.manual_seed(5)
    return VanillaTransformerForConditionalGeneration(tiny_config).train()


def two_passes(model, batch):
    """Logits `[N, V]` of both passes and labels `[N]`, for the chance that `r_drop` has."""
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    torch.manual_seed(9)
    halves = model(**twice, return_logits=True).logits.chunk(2)
    is_target = batch["labels"] != -100
    return *(half[is_target] for half in halves), batch["labels"][is_target]


def divergence_of(first, second):
    """Mean of both directions, summed over the rows."""
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    directions = [(log_p, log_q), (log_q, log_p)]
    return sum(F.kl_div(b, a, log_target=True, reduction="sum") for a, b in directions) / 2


def cross_entropy_of(first, second, targets):
    """Of both passes together, smoothed, summed over the rows."""
    return sum(
        F.cross_entropy(half, targets, label_smoothing=0.1, reduction="sum")
        for half in (first, second)
    )


@pytest.mark.parametrize("path", ["fused", "module", "compiled", "logits"])
@pytest.mark.parametrize("length", [1, 7])
def test_loss_and_its_gradients_are_those_of_torch(monkeypatch, path, length):
    torch.manual_seed(length)
    projection = nn.Linear(5, 7, dtype=torch.double)
    states = torch.randn(6, length, 5, dtype=torch.double, requires_grad=True)
    labels = torch.randint(7, (3, length))
    labels[1, : length // 2] = -100
    twice = torch.cat([labels, labels])
    inputs = [states, *projection.parameters()]
    first, second = (half[labels != -100] for half in projection(states).chunk(2))
    expected = cross_entropy_of(first, second, labels[labels != -100])
    expected += ALPHA * divergence_of(first, second)
    expected_gradients = torch.autograd.grad(5 * expected, inputs)
    if path == "module":
        projection.register_forward_hook(lambda module, inputs, output: None)
    if path == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    if path == "logits":
        actual = loss_sum(projection(states), twice, LossTerms(0.1, ALPHA))
    else:
        actual = projected_loss_sum(projection, states, twice, LossTerms(0.1, ALPHA))
    actual_gradients = torch.autograd.grad(5 * actual, inputs)

    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_gradients, expected_gradients)


def test_divergence_is_finite_when_one_pass_excludes_what_the_other_takes():
    projection = nn.Linear(1, 2, bias=False)
    projection.weight.data = torch.tensor([[100.0], [-100.0]])
    states = torch.tensor([[[1.0]], [[-1.0]]]).requires_grad_()

    total = projected_loss_sum(projection, states, torch.tensor([[0], [0]]), LossTerms(0.0, ALPHA))
    total.backward()

    # The second pass has a cross-entropy of 200, as has each direction of the divergence.
    assert total.item() == pytest.approx(200 + ALPHA * 200)
    assert states.grad.isfinite().all()


def test_loss_is_the_mean_cross_entropy_plus_half_alpha_times_the_divergence(dropping_model, batch):
    first, second, targets = two_passes(dropping_model, batch)
    divergence = divergence_of(first, second) / len(targets)
    assert divergence > 0.01
    cross_entropy = cross_entropy_of(first, second, targets) / len(targets)

    torch.manual_seed(9)
    loss = r_drop(dropping_model, ALPHA, **batch).loss

    torch.testing.assert_close(loss, cross_entropy / 2 + ALPHA / 2 * divergence)
    without_targets = batch | {"labels": torch.full_like(batch["labels"], -100)}
    assert r_drop(dropping_model, ALPHA, **without_targets).loss.item() == 0


def test_loss_does_not_depend_on_returning_the_logits(dropping_model, batch):
    torch.manual_seed(9)
    expected = r_drop(dropping_model, ALPHA, **batch).loss
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}

    torch.manual_seed(9)
    loss = dropping_model(**twice, r_drop_alpha=ALPHA, return_logits=True).loss

    torch.testing.assert_close(loss, expected)


def test_parts_of_a_batch_add_up_to_it(tiny_model, batch):
    def weaken_the_second_pass(module, inputs, outputs):
        """A second pass that differs from the first, without chance."""
        first, _ = outputs["last_hidden_state"].chunk(2)
        outputs["last_hidden_state"] = torch.cat([first, -first])
        return outputs

    expected = tiny_model.train()(**batch).loss
    tiny_model.model.register_forward_hook(weaken_the_second_pass)
    targets = (batch["labels"] != -100).sum()

    whole = r_drop(tiny_model, ALPHA, **batch).loss
    parts = [
        r_drop(
            tiny_model,
            ALPHA,
            num_items_in_batch=targets,
            **{name: tensor[rows] for name, tensor in batch.items()},
        ).loss
        for rows in (slice(0, 1), slice(1, 3))
    ]

    assert whole > expected + 0.1
    torch.testing.assert_close(sum(parts), whole)
