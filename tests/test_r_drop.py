"""R-Drop against its formula, in float64 and from logits alone."""

import pytest
import torch
import torch.nn.functional as F

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer import r_drop as module
from vanilla_transformer.r_drop import SymmetricDivergence, r_drop

ALPHA = 3.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 4)


@pytest.fixture
def dropping_model(tiny_config):
    """A model in training, whose two passes differ, and which smooths its labels."""
    tiny_config.dropout, tiny_config.label_smoothing = 0.4, 0.1
    torch.manual_seed(5)
    return VanillaTransformerForConditionalGeneration(tiny_config).train()


def divergence_of(first, second):
    """Mean of both directions, summed over the rows."""
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    directions = [(log_p, log_q), (log_q, log_p)]
    return sum(F.kl_div(b, a, log_target=True, reduction="sum") for a, b in directions) / 2


@pytest.mark.parametrize("rows", [1, 4, 11])
def test_divergence_and_its_gradients_are_those_of_torch(rows):
    torch.manual_seed(rows)
    logits = [(3 * torch.randn(rows, 7, dtype=torch.double)).requires_grad_() for _ in range(2)]
    expected = divergence_of(*logits)
    expected_gradients = torch.autograd.grad(5 * expected, logits)

    actual = SymmetricDivergence.apply(*logits)
    actual_gradients = torch.autograd.grad(5 * actual, logits)

    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_gradients, expected_gradients)


def test_divergence_is_finite_when_one_pass_excludes_what_the_other_takes():
    logits = [torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 200.0]])]
    first, second = (half.requires_grad_() for half in logits)

    total = SymmetricDivergence.apply(first, second)
    total.backward()

    assert total.item() == pytest.approx(200)
    assert first.grad.isfinite().all()


def test_loss_is_the_mean_cross_entropy_plus_half_alpha_times_the_divergence(dropping_model, batch):
    outputs = r_drop(dropping_model, ALPHA, **batch)

    halves = outputs.logits.double().chunk(2)
    is_target = batch["labels"] != -100
    first, second = (half[is_target] for half in halves)
    targets = batch["labels"][is_target]
    cross_entropies = [
        F.cross_entropy(half, targets, label_smoothing=0.1) for half in (first, second)
    ]
    divergence = divergence_of(first, second) / len(targets)
    assert divergence > 0.01
    expected = sum(cross_entropies) / 2 + ALPHA / 2 * divergence
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_gradients_are_those_of_automatic_differentiation(dropping_model, batch):
    torch.manual_seed(9)
    r_drop(dropping_model, ALPHA, **batch).loss.backward()
    actual = {name: parameter.grad for name, parameter in dropping_model.named_parameters()}
    dropping_model.zero_grad()

    torch.manual_seed(9)
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    outputs = dropping_model(**twice, return_logits=True)
    first, second = (half[batch["labels"] != -100] for half in outputs.logits.chunk(2))
    (outputs.loss + ALPHA / 2 * divergence_of(first, second) / len(first)).backward()

    for name, parameter in dropping_model.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, msg=name, rtol=1e-4, atol=1e-6)


def test_loss_is_that_of_one_pass_when_nothing_is_dropped(tiny_model, batch):
    tiny_model.train()

    torch.testing.assert_close(r_drop(tiny_model, ALPHA, **batch).loss, tiny_model(**batch).loss)


def test_parts_of_a_batch_add_up_to_it(tiny_model, batch):
    def uneven(**inputs):
        """A second pass that differs from the first, without chance."""
        outputs = tiny_model.train()(**inputs)
        first, _ = outputs.logits.chunk(2)
        outputs["logits"] = torch.cat([first, torch.zeros_like(first)])
        return outputs

    targets = (batch["labels"] != -100).sum()

    whole = r_drop(uneven, ALPHA, **batch).loss
    parts = [
        r_drop(
            uneven,
            ALPHA,
            num_items_in_batch=targets,
            **{name: tensor[rows] for name, tensor in batch.items()},
        ).loss
        for rows in (slice(0, 1), slice(1, 3))
    ]

    assert whole > tiny_model(**batch).loss + 0.1
    torch.testing.assert_close(sum(parts), whole)


def test_batch_without_any_target_has_a_loss_of_zero(dropping_model, batch):
    batch["labels"] = torch.full_like(batch["labels"], -100)

    assert r_drop(dropping_model, ALPHA, **batch).loss.item() == 0
