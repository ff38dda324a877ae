"""The model against the slow oracle, in float64: outputs, loss and every gradient."""

import math

import pytest
import torch
from torch import Tensor, nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.modeling import loss_vanilla_transformer

from ..conftest import build_variant, each_variant
from ..support import reference

Batch = dict[str, Tensor]

LEFT_PADDED_TARGET: Batch = {
    "decoder_input_ids": torch.tensor([[0, 1, 6, 33, 19], [1, 25, 7, 4, 9], [0, 0, 0, 1, 10]]),
    "decoder_attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5, [0, 0, 0, 1, 1]]),
}


def build_model(
    attention: str | None = None, **changes: object
) -> VanillaTransformerForConditionalGeneration:
    """The tiny model in float64, with changed config fields and, if told, a chosen attention."""
    return build_variant(**changes, attn_implementation=attention).double()


def move_padding(source: Batch, side: str) -> Batch:
    """The same sentences padded on one side, or with tokens in place of padding and no mask."""
    input_ids, attention_mask = source["input_ids"], source["attention_mask"]
    if side == "none":
        return {"input_ids": input_ids.masked_fill(attention_mask == 0, 7)}
    if side == "left":
        shifts = (attention_mask == 0).sum(dim=1).tolist()
        input_ids, attention_mask = (
            torch.stack([row.roll(shift) for row, shift in zip(rows, shifts, strict=True)])
            for rows in (input_ids, attention_mask)
        )
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def assert_same(actual: Tensor, expected: Tensor, name: str) -> None:
    """Equal to 1e-9 of the largest entry: single entries may cancel to rounding noise."""
    tolerance = 1e-9 * expected.abs().max().item()
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def assert_loss_and_gradients_equal_the_oracle(
    model: VanillaTransformerForConditionalGeneration,
    source: Batch,
    labels: Tensor,
    num_items_in_batch: int | None = None,
) -> None:
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

    actual = model.train()(**source, labels=labels, num_items_in_batch=num_items_in_batch).loss
    actual.backward()

    assert_same(actual, expected, "loss")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert_same(parameter.grad, weights[name].grad, name)


def test_oracle_sinusoid_gives_sine_and_cosine_of_falling_frequencies():
    expected = torch.tensor([math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)])

    torch.testing.assert_close(reference.sinusoid(3, d_model=4), expected.double())


def test_oracle_softmax_gives_odds_of_exponentials():
    torch.testing.assert_close(
        reference.softmax(torch.tensor([0.0, math.log(3)])), torch.tensor([0.25, 0.75])
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_oracle_loss_is_that_of_torch(label_smoothing):
    scores = torch.linspace(-2, 3, 7, dtype=torch.float64) ** 2

    actual = reference.token_loss(scores, 4, label_smoothing)

    expected = nn.functional.cross_entropy(scores, torch.tensor(4), label_smoothing=label_smoothing)
    torch.testing.assert_close(actual, expected)


def test_oracle_logits_ignore_later_target_tokens(batch):
    model = build_model()
    weights = reference.leaves(model.state_dict())
    edited = batch["decoder_input_ids"].clone()
    edited[0, 3] += 1
    source = (batch["input_ids"], batch["attention_mask"])

    before = reference.logits(weights, model.config, *source, batch["decoder_input_ids"])[0]
    after = reference.logits(weights, model.config, *source, edited)[0]

    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_logits_equal_the_oracle(batch, attention, side):
    model = build_model(attention)
    source = move_padding(batch, side)
    decoder_input_ids = batch["decoder_input_ids"]

    actual = model(**source, decoder_input_ids=decoder_input_ids).logits

    expected = reference.logits(
        reference.leaves(model.state_dict()),
        model.config,
        source["input_ids"],
        source.get("attention_mask"),
        decoder_input_ids,
    )
    assert_same(actual, torch.stack(expected), "logits")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_equal_the_oracle_when_the_target_is_padded_on_the_left(batch, attention):
    model = build_model(attention)
    source = move_padding(batch, "right")
    target = LEFT_PADDED_TARGET

    actual = model(**source, **target).logits

    expected = reference.logits(
        reference.leaves(model.state_dict()), model.config, **source, **target
    )
    is_real = target["decoder_attention_mask"].bool()
    assert_same(actual[is_real], torch.cat(expected), "logits")


def test_evaluation_loss_equals_the_unsmoothed_oracle_when_training_smooths(batch):
    model = build_model(label_smoothing=0.1)
    source = move_padding(batch, "right")

    actual = model(**source, labels=batch["labels"])

    weights = reference.leaves(model.state_dict())
    expected = reference.loss(weights, model.config, **source, labels=batch["labels"])
    assert_same(actual.loss, expected, "loss")
    assert actual.logits.shape == (3, 5, 37)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize("side", ["right", "left", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_training_equals_the_oracle(batch, attention, side, label_smoothing):
    model = build_model(attention, label_smoothing=label_smoothing)

    assert_loss_and_gradients_equal_the_oracle(model, move_padding(batch, side), batch["labels"])


@each_variant
def test_training_equals_the_oracle_when_config_departs_from_the_default(batch, changes):
    # Under the kernel that Transformers chooses, which is sdpa where heads do not talk.
    model = build_model(**changes, label_smoothing=0.1)

    assert_loss_and_gradients_equal_the_oracle(model, move_padding(batch, "right"), batch["labels"])


@each_variant
def test_logits_equal_the_oracle_when_config_departs_from_the_default(batch, changes):
    model = build_model("eager", **changes)
    source = move_padding(batch, "left")
    target = LEFT_PADDED_TARGET

    actual = model(**source, **target).logits

    weights = reference.leaves(model.state_dict())
    expected = reference.logits(weights, model.config, **source, **target)
    is_real = target["decoder_attention_mask"].bool()
    assert_same(actual[is_real], torch.cat(expected), "logits")


@each_variant
def test_generation_equals_the_oracle_when_config_departs_from_the_default(batch, changes):
    model = build_model(**changes)
    source = move_padding(batch, "left")

    generated = model.generate(**source, num_beams=1, do_sample=False, max_new_tokens=6)

    weights = reference.leaves(model.state_dict())
    expected = reference.greedy(weights, model.config, **source, max_new_tokens=6)
    padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in expected], batch_first=True)
    assert generated.tolist() == padded.tolist()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_training_equals_the_oracle_when_num_items_in_batch_is_given(batch, label_smoothing):
    model = build_model(label_smoothing=label_smoothing)

    assert_loss_and_gradients_equal_the_oracle(
        model, move_padding(batch, "right"), batch["labels"], num_items_in_batch=29
    )


def test_training_equals_the_oracle_when_labels_are_ignored_amid_a_target(batch):
    model = build_model(label_smoothing=0.1)
    labels = batch["labels"].clone()
    labels[0, :2] = labels[2, 1] = -100

    assert_loss_and_gradients_equal_the_oracle(model, move_padding(batch, "right"), labels)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("path", ["fused", "module", "compiled"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_training_equals_the_oracle_when_targets_fill_several_chunks(
    batch, monkeypatch, label_smoothing, path, bias
):
    # Of 15 target positions 12 are real: two whole chunks and a shorter one, or, where the module
    # is called, three of equal size. Compiled, all 15 are in eight chunks of two and of one.
    monkeypatch.setattr(loss_vanilla_transformer, "CHUNK_ROWS", 5)
    model = build_model(label_smoothing=label_smoothing, lm_head_bias=bias)
    chunk_rows: set[int] = set()
    if path == "module":
        # The fused path is not for a projection with hooks.
        model.lm_head.register_forward_hook(
            lambda module, inputs, output: chunk_rows.add(output[..., 0].numel())
        )
    if path == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    assert_loss_and_gradients_equal_the_oracle(model, move_padding(batch, "right"), batch["labels"])

    assert chunk_rows == ({4} if path == "module" else set())


# The name that replaces the deprecated one does not exist in Transformers 5.17.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_training_equals_the_oracle_when_gradients_are_checkpointed(batch):
    model = build_model(label_smoothing=0.1)
    model.gradient_checkpointing_enable()
    calls: list[nn.Module] = []
    model.model.encoder.layers[1].fc1.register_forward_hook(
        lambda module, inputs, output: calls.append(module)
    )

    assert_loss_and_gradients_equal_the_oracle(model, move_padding(batch, "right"), batch["labels"])

    assert len(calls) == 2  # once on the way forward, once more on the way back


def test_gradients_through_returned_logits_equal_the_oracle(batch):
    model = build_model(label_smoothing=0.1).train()
    source = move_padding(batch, "right")
    weights = reference.leaves(dict(model.named_parameters()))
    target_ids = batch["decoder_input_ids"]
    scores = torch.stack(
        reference.logits(weights, model.config, **source, decoder_input_ids=target_ids)
    )
    expected = reference.loss(
        weights, model.config, **source, labels=batch["labels"], label_smoothing=0.1
    )
    (expected + scores.square().mean()).backward()

    output = model(**source, labels=batch["labels"], return_logits=True)
    (output.loss + output.logits.square().mean()).backward()

    assert_same(output.logits, scores, "logits")
    assert_same(output.loss, expected, "loss")
    for name, parameter in model.named_parameters():
        assert_same(parameter.grad, weights[name].grad, name)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation_equals_the_oracle(batch, side, use_cache):
    model = build_model()
    source = move_padding(batch, side)

    generated = model.generate(
        **source, num_beams=1, do_sample=False, max_new_tokens=8, use_cache=use_cache
    )

    weights = reference.leaves(model.state_dict())
    expected = reference.greedy(weights, model.config, **source, max_new_tokens=8)
    padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in expected], batch_first=True)
    assert generated.tolist() == padded.tolist()


def test_greedy_generation_has_to_forbid_tokens_in_the_tiny_model(tiny_model, batch):
    source = move_padding(batch, "right")
    generated = tiny_model.generate(**source, num_beams=1, do_sample=False, max_new_tokens=8)

    favourites = tiny_model(**source, decoder_input_ids=generated).logits.argmax(dim=-1)

    # Otherwise the comparison with the oracle above says nothing about `<pad>` and `<s>`, nor about
    # sentences that end at different times.
    lengths = (generated != 0).sum(dim=1)
    is_inside = torch.arange(generated.shape[1]) < lengths[:, None] - 1
    assert {0, 1} <= set(favourites[is_inside].tolist())
    assert len(set(lengths.tolist())) == 3
