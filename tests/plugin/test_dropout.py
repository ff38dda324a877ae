"""Dropout: rate, independence, seed, and the places where the paper has it."""

import math
from collections import Counter

import pytest
import torch

from ..conftest import both_attentions, build_variant, gradients, record_calls


# The name that replaces the deprecated one does not exist in Transformers 5.17.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_draws_the_same_masks_again(batch):
    model = build_variant(dropout=0.4, attention_dropout=0.4, activation_dropout=0.4)
    torch.manual_seed(5)
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable()

    torch.manual_seed(5)

    torch.testing.assert_close(gradients(model, batch), expected)


@both_attentions
@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_rate_has_an_effect_in_training_only(batch, attention, rate):
    model = build_variant(**{rate: 0.5}, attn_implementation=attention)

    for training in (False, True):
        first, second = (model.train(training)(**batch).loss for _ in range(2))
        assert torch.equal(first, second) != training


def test_dropout_follows_the_embedding_sum_and_each_sublayer(tiny_model, batch):
    calls = record_calls(tiny_model, "coder.dropout")
    layer_calls = record_calls(tiny_model, "s.0.dropout")

    tiny_model(**batch)

    assert Counter(calls) == {"model.encoder.dropout": 1, "model.decoder.dropout": 1}
    assert Counter(layer_calls) == {
        "model.encoder.layers.0.dropout": 2,
        "model.decoder.layers.0.dropout": 3,
    }


@pytest.mark.parametrize("has_norm", [False, True])
def test_dropout_of_the_embedding_sum_drops_the_positions_too(batch, has_norm):
    encoder = build_variant(dropout=0.5, embedding_layer_norm=has_norm).train().model.encoder

    hidden = encoder(batch["input_ids"], output_hidden_states=True).hidden_states[0]

    # Five standard deviations; positions alone have zeros in half the columns of position 0.
    play = 5 * math.sqrt(0.25 / hidden.numel())
    assert abs((hidden == 0).float().mean() - 0.5) < play


def test_bias_of_the_feed_forward_network_remains_when_its_activation_is_dropped(tiny_model):
    layer, x = tiny_model.model.decoder.layers[0], torch.randn(3, 5, 24)
    layer.activation_dropout.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))

    assert torch.equal(layer.feed_forward(x), layer.fc2.bias.expand_as(x))


def test_residual_stream_passes_when_every_sublayer_is_dropped(tiny_model, batch):
    for stack in (tiny_model.model.encoder, tiny_model.model.decoder):
        for layer in stack.layers:
            layer.dropout.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))

    output = tiny_model(**batch, output_hidden_states=True)

    for hidden_states in (output.encoder_hidden_states, output.decoder_hidden_states):
        for hidden in hidden_states[1:-1]:
            assert torch.equal(hidden, hidden_states[0])
    expected = tiny_model.model.encoder.layer_norm(output.encoder_hidden_states[0])
    assert torch.equal(output.encoder_last_hidden_state, expected)
