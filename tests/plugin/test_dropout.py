"""Dropout: rate, independence, seed, and the places where the paper has it."""

import math
from collections import Counter

import pytest
import torch

from vanilla_transformer.cpu_vanilla_transformer import Dropout
from vanilla_transformer.layers_vanilla_transformer import Layer

from ..conftest import both_attentions, build_variant, gradients, record_calls


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


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_is_the_identity_when_off(p, training):
    x = torch.randn(7, 5)

    assert Dropout(p).train(training)(x) is x


def test_dropout_is_drawn_from_torchs_seed():
    dropout, x = Dropout(0.5), torch.ones(9, 11)

    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)

    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_passes_the_gradient_of_kept_entries_only(dtype):
    x = torch.ones(13, 17, dtype=dtype, requires_grad=True)

    dropped = Dropout(0.3)(x)
    dropped.backward(torch.ones_like(x))

    assert dropped.dtype == dtype
    assert torch.equal(x.grad, dropped.detach())
    assert 0 < dropped.count_nonzero() < x.numel()


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


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activation_is_computed_again_with_the_same_dropout(tiny_model, activation):
    config = tiny_model.config
    config.activation_function, config.activation_dropout = activation, 0.4
    layer, x = Layer(config, ffn_dim=40).train(), torch.randn(3, 5, config.d_model)

    def derivatives(feed_forward):
        torch.manual_seed(5)
        return torch.autograd.grad(feed_forward(x).square().sum(), layer.fc1.weight)

    expected = derivatives(
        lambda x: layer.fc2(layer.activation_dropout(layer.activation(layer.fc1(x))))
    )
    torch.testing.assert_close(derivatives(layer.feed_forward), expected)


def test_feed_forward_network_keeps_one_wide_tensor_whatever_its_activation(tiny_model):
    rows, wide = 7, 40
    for activation in ("relu", "gelu", "silu"):
        tiny_model.config.activation_function = activation
        layer, kept = Layer(tiny_model.config, ffn_dim=wide).train(), []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda none: none):
            layer.feed_forward(torch.randn(rows, tiny_model.config.d_model))
        assert len({one.data_ptr() for one in kept if one.shape == (rows, wide)}) == 1
