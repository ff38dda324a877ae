"""Properties of the forward pass that hold for any weights."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.utils.output_capturing import OutputRecorder

from ..models import both_attentions, gradients, source_of, without_labels


def test_encoder_outputs_stand_for_sources(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits
    encoded = tiny_model.get_encoder()(inputs.pop("input_ids"), inputs["attention_mask"])

    for encoder_outputs in (encoded, (encoded.last_hidden_state,)):
        actual = tiny_model(**inputs, encoder_outputs=encoder_outputs).logits
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("given", ["both", "neither"])
@pytest.mark.parametrize(("stack", "prefix"), [("Encoder", ""), ("Decoder", "decoder_")])
def test_ids_and_embeddings_exclude_each_other(tiny_model, batch, stack, prefix, given):
    inputs: dict[str, Any] = without_labels(batch)
    if given == "both":
        inputs[f"{prefix}inputs_embeds"] = torch.zeros(3, 5, 24)
    else:
        del inputs[f"{prefix}input_ids"]

    with pytest.raises(ValueError, match=rf"{stack} needs either .* got {given}"):
        tiny_model(**inputs)


def test_mask_of_four_dimensions_replaces_the_causal_one_and_moves_no_position(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits
    sees = torch.ones(3, 1, 5, 5).tril().bool()

    actual = tiny_model(**inputs, decoder_attention_mask=sees).logits
    of_itself = tiny_model(**inputs, decoder_attention_mask=sees & sees.mT).logits

    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(of_itself[:, 0], expected[:, 0])
    assert not torch.isclose(of_itself[:, 1:], expected[:, 1:]).all()


def test_mask_of_numbers_hides_keys_in_bfloat16_on_a_cpu(tiny_model, batch):
    tiny_model.bfloat16()
    sees = torch.ones(3, 1, 5, 5).tril().bool()
    expected = gradients(tiny_model, {**batch, "decoder_attention_mask": sees})
    numbers = torch.zeros(sees.shape, dtype=torch.bfloat16).masked_fill(~sees, -torch.inf)

    actual = gradients(tiny_model, {**batch, "decoder_attention_mask": numbers})

    torch.testing.assert_close(actual, expected)


@pytest.mark.skipif(
    not hasattr(OutputRecorder, "num_hidden_layers_key"), reason="Transformers selects no states"
)
def test_last_states_of_each_stack_are_returned_alone(tiny_model, batch):
    output = tiny_model(**batch, output_hidden_states=-1)

    # Two layers and three, and the embeddings below each stack.
    assert [x is None for x in output.encoder_hidden_states] == [True] * 2 + [False]
    assert [x is None for x in output.decoder_hidden_states] == [True] * 3 + [False]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_checkpointing_model_in_training_mode_decodes_where_it_has_no_gradients(tiny_model, batch):
    expected = tiny_model.generate(**source_of(batch), use_transformers_search=True)
    tiny_model.gradient_checkpointing_enable()
    tiny_model.train()

    actual = tiny_model.generate(**source_of(batch), use_transformers_search=True)

    assert actual.tolist() == expected.tolist()


@torch.no_grad()
def test_cache_of_the_targets_alone_serves_too(tiny_model, batch):
    inputs, cache = without_labels(batch), DynamicCache()
    expected = tiny_model(**inputs).logits
    targets = inputs.pop("decoder_input_ids")

    for piece in targets.split(2, dim=1):
        last = tiny_model(**inputs, decoder_input_ids=piece, past_key_values=cache).logits

    torch.testing.assert_close(last, expected[:, 4:])


@both_attentions
@torch.no_grad()
def test_logits_in_bfloat16_are_close_to_float32(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits

    actual = tiny_model.bfloat16()(**inputs).logits

    # Eight bits of mantissa through five layers.
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() < 0.05 * expected.norm()


@both_attentions
def test_gradients_under_autocast_are_close_to_float32(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)
    expected = gradients(tiny_model, batch)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gradients(tiny_model, batch)

    # A rounding to bfloat16 is off by up to 2^-9; some hundred of them lie on the way through five
    # layers and back, and a few ReLUs switch. The layer farthest from the loss is off by 9 %.
    error = {name: (gradient - expected[name]).norm() for name, gradient in actual.items()}
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        assert error[name] < 0.2 * expected[name].norm(), name
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert torch.stack(list(error.values())).norm() < 0.05 * total
