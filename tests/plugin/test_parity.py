"""The model against the slow oracle, in float64: outputs, loss and every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ..models import Batch, Model, build_variant
from ..support import reference


def build_model(attention: str | None = None, **changes: object) -> Model:
    """The tiny model in float64, with changed config fields and, if told, a chosen attention."""
    return build_variant(**changes, attn_implementation=attention).double()


def padded_source(batch: Batch, side: str) -> Batch:
    """The same sentences padded on one side with an ordinary token; "none": it is read as one."""
    attention_mask = batch["attention_mask"]
    input_ids = batch["input_ids"].masked_fill(attention_mask == 0, 7)
    if side == "none":
        return {"input_ids": input_ids}
    if side == "left":
        shifts = (attention_mask == 0).sum(dim=1).tolist()
        input_ids, attention_mask = (
            torch.stack([row.roll(shift) for row, shift in zip(rows, shifts, strict=True)])
            for rows in (input_ids, attention_mask)
        )
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def padded_target(batch: Batch, side: str) -> Batch:
    """What the decoder reads; padded on the left it needs a mask."""
    if side != "left":
        return {"decoder_input_ids": batch["decoder_input_ids"]}
    return {
        "decoder_input_ids": torch.tensor([[7, 1, 6, 33, 19], [1, 25, 7, 4, 9], [7, 7, 7, 1, 10]]),
        "decoder_attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5, [0, 0, 0, 1, 1]]),
    }


def assert_same(actual: Tensor, expected: Tensor, name: str) -> None:
    """Equal to 1e-9 of the largest entry: single entries may cancel to rounding noise."""
    tolerance = 1e-9 * expected.abs().max().item() + 1e-15
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def assert_same_gradients(model: Model, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert_same(parameter.grad, weights[name].grad, name)


def check_of_training(
    model: Model, source: Batch, labels: Tensor, num_items_in_batch: int | None = None
) -> Callable[[Model], None]:
    """Compares loss and gradients of a model that has the weights of this one with the oracle's."""
    weights = reference.leaves(dict(model.named_parameters()))
    expected = reference.loss(
        weights,
        model.config,
        source["input_ids"],
        source.get("attention_mask"),
        labels,
        model.config.label_smoothing,
        num_items_in_batch,
    )
    expected.backward()

    def check(model: Model) -> None:
        actual = model.train()(**source, labels=labels, num_items_in_batch=num_items_in_batch).loss
        actual.backward()
        assert_same(actual, expected, "loss")
        assert_same_gradients(model, weights)

    return check


@torch.no_grad()
def assert_logits_equal_the_oracle(models: list[Model], source: Batch, target: Batch) -> None:
    """All models have the same weights."""
    weights = reference.leaves(dict(models[0].named_parameters()))
    expected = reference.logits(
        weights, models[0].config, source["input_ids"], source.get("attention_mask"), **target
    )
    for model in models:
        actual = model(**source, **target).logits
        mask = target.get("decoder_attention_mask", torch.ones(actual.shape[:2]))
        assert_same(actual[mask.bool()], torch.cat(expected), "logits")


# The oracle is slow: each test asks it once for all that must agree.
each_side = pytest.mark.parametrize("side", ["right", "left", "none"])
ATTENTIONS = ("eager", "sdpa")


@each_side
def test_logits_equal_the_oracle(batch, side):
    models = [build_model(attention) for attention in ATTENTIONS]

    assert_logits_equal_the_oracle(models, padded_source(batch, side), padded_target(batch, side))


@each_side
def test_training_equals_the_oracle(batch, side):
    models = [build_model(attention, label_smoothing=0.1) for attention in ATTENTIONS]
    labels = batch["labels"].clone()
    # Ignored labels at the beginning and amid a target: the decoder reads padding after them.
    labels[0, :2] = labels[2, 1] = -100

    check = check_of_training(models[0], padded_source(batch, side), labels)

    for model in models:
        check(model)


def test_training_equals_the_oracle_when_targets_fill_several_chunks(batch, monkeypatch):
    # Of 15 target positions 12 are real: two whole chunks and a shorter one, or, where the module
    # is called, three of equal size. Compiled, all 15 are in eight chunks of two and of one.
    monkeypatch.setattr("vanilla_transformer.fast_loss_vanilla_transformer.CHUNK_ROWS", 5)
    fused, module, compiled = (
        build_model(label_smoothing=0.1, lm_head_bias=True) for _ in range(3)
    )
    chunk_rows: set[int] = set()
    # The fused path is not for a projection with hooks.
    module.lm_head.register_forward_hook(lambda *call: chunk_rows.add(call[-1][..., 0].numel()))

    check = check_of_training(fused, padded_source(batch, "right"), batch["labels"], 29)

    check(fused)
    check(module)
    assert chunk_rows == {4}
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check(compiled)


def test_gradients_through_returned_logits_equal_the_oracle(batch):
    model = build_model(label_smoothing=0.1).train()
    source = padded_source(batch, "right")
    weights = reference.leaves(dict(model.named_parameters()))
    scores = torch.stack(
        reference.logits(weights, model.config, **source, **padded_target(batch, "right"))
    )
    expected = reference.loss(
        weights, model.config, **source, labels=batch["labels"], label_smoothing=0.1
    )
    (expected + scores.square().mean()).backward()

    output = model(**source, labels=batch["labels"], return_logits=True)
    (output.loss + output.logits.square().mean()).backward()

    assert_same(output.logits, scores, "logits")
    assert_same(output.loss, expected, "loss")
    assert_same_gradients(model, weights)


@pytest.mark.parametrize("side", ["right", "left"])
def test_greedy_generation_equals_the_oracle(batch, side):
    model = build_model()
    source = padded_source(batch, side)
    weights = reference.leaves(model.state_dict())
    expected = reference.greedy(weights, model.config, **source, max_new_tokens=8)
    padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in expected], batch_first=True)

    for use_cache in (True, False):
        generated = model.generate(**source, max_new_tokens=8, use_cache=use_cache)
        assert generated.tolist() == padded.tolist()


def test_greedy_generation_has_to_forbid_tokens_in_the_tiny_model(tiny_model, batch):
    source = padded_source(batch, "right")
    generated = tiny_model.generate(**source, max_new_tokens=8)

    favourites = tiny_model(**source, decoder_input_ids=generated).logits.argmax(dim=-1)

    # Otherwise the comparison with the oracle above says nothing about `<pad>` and `<s>`, nor about
    # sentences that end at different times.
    lengths = (generated != 0).sum(dim=1)
    is_inside = torch.arange(generated.shape[1]) < lengths[:, None] - 1
    assert {0, 1} <= set(favourites[is_inside].tolist())
    assert len(set(lengths.tolist())) == 3
