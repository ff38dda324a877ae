"""Positions, attention and dropout: what layers compute, and in which order."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer.layers_vanilla_transformer import NORMS, rotate

from ..models import (
    LEARNED,
    ROTARY,
    both_attentions,
    build_variant,
    gradients,
    pad,
    record_calls,
    source_of,
    without_labels,
)

END_OF_LEARNED = r"(?s)9.*max_position_embeddings.*got .*1\d"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_computes_in_float32_and_keeps_the_dtype(norm_type, dtype):
    norm = NORMS[norm_type](2**12, 1e-5)
    # Their squares are too large for float16, and bfloat16 has eight bits for their mean.
    x = (300 * torch.randn(20, 2**12) + 3000).to(dtype)
    expected = norm(x.float())

    normed = norm.to(dtype)(x)

    assert normed.dtype == dtype
    torch.testing.assert_close(normed, expected.to(dtype))
    # Single entries are rounded; over a whole vector that averages out.
    lengths = normed.float().norm(dim=-1), expected.norm(dim=-1)
    torch.testing.assert_close(*lengths, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_turned_heads_keep_the_dtype_of_autocast(dtype):
    heads = torch.randn(1, 2, 5, 6).to(dtype)
    positions = torch.randn(1, 5, 3, 2)

    turned = rotate(heads, positions)

    assert turned.dtype == dtype
    torch.testing.assert_close(turned, rotate(heads.float(), positions).to(dtype))


@pytest.mark.parametrize("offset", [0, 3])
def test_sequence_past_the_end_of_learned_positions_is_refused(offset):
    model = build_variant(**LEARNED, position_offset=offset)
    ids = torch.full((2, 10), 7)

    with pytest.raises(ValueError, match=END_OF_LEARNED):
        model(input_ids=ids, decoder_input_ids=ids[:, :3])
    with pytest.raises(ValueError, match=END_OF_LEARNED):
        model(input_ids=ids[:, :3], decoder_input_ids=ids)
    model(input_ids=ids[:, :9], decoder_input_ids=ids[:, :9])


@pytest.mark.parametrize(
    "cache", [{"use_cache": False}, {}, {"cache_implementation": "static"}], ids=str
)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_past_the_end_of_learned_positions_is_refused(batch, num_beams, cache):
    model = build_variant(**LEARNED)
    settings: dict[str, Any] = {"num_beams": num_beams, **cache}

    # The start token and eight more are read, the ninth is only written.
    written = model.generate(**source_of(batch), **settings, min_new_tokens=9, max_new_tokens=9)
    assert written.shape == (3, 10)
    with pytest.raises(ValueError, match=END_OF_LEARNED):
        model.generate(**source_of(batch), **settings, min_new_tokens=12, max_new_tokens=12)


@pytest.mark.parametrize("positions", [{}, ROTARY], ids=["added", "rotary"])
@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_goes_on_from_prefixes_padded_on_the_left(
    batch, num_beams, cache_implementation, positions
):
    tiny_model = build_variant(**positions)
    prefixes = [torch.tensor([1, 6, 33]), torch.tensor([1]), torch.tensor([1, 10])]
    decoder_input_ids, decoder_attention_mask = pad(prefixes, "left", extra=0, filler=7)
    search = {"num_beams": num_beams, "min_new_tokens": 5, "max_new_tokens": 5}
    if cache_implementation:
        search["cache_implementation"] = cache_implementation

    together = tiny_model.generate(
        **source_of(batch),
        decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_attention_mask,
        **search,
    )

    for number, prefix in enumerate(prefixes):
        source = {name: rows[number : number + 1] for name, rows in source_of(batch).items()}
        alone = tiny_model.generate(**source, decoder_input_ids=prefix[None], **search)[0]
        assert together[number, 3:].tolist() == alone[len(prefix) :].tolist()


@pytest.mark.parametrize(("d_k", "scaling"), [(None, 6**-0.5), (5, 5**-0.5), (16, 0.25)])
def test_scores_are_divided_by_the_root_of_the_key_size(batch, monkeypatch, d_k, scaling):
    used = []

    def look(*args: Any, scaling: float, **kwargs: Any) -> Any:
        used.append(scaling)
        return sdpa_attention_forward(*args, scaling=scaling, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", look)
    build_variant(encoder_attention_heads=4, d_k=d_k, d_v=7)(**batch)

    assert used == pytest.approx([scaling] * 8)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("talking_heads", [None, "logits", "weights", "both"])
def test_softmax_runs_in_float32_under_eager_attention(
    monkeypatch, batch, precision, talking_heads
):
    model = build_variant(talking_heads=talking_heads, attn_implementation="eager").to(precision)
    dtypes = []
    softmax = Tensor.softmax

    def look(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        probabilities = softmax(scores, *args, **kwargs)
        dtypes.append(probabilities.dtype)
        return probabilities

    monkeypatch.setattr(Tensor, "softmax", look)
    with torch.no_grad():
        model(**without_labels(batch))

    assert dtypes == [torch.float32] * 8


# The name that replaces the deprecated one does not exist in Transformers 5.17.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_draws_the_same_masks_again(batch):
    model = build_variant(dropout=0.4, attention_dropout=0.4, activation_dropout=0.4)
    # No gradient then reaches the first layer's input.
    model.get_input_embeddings().requires_grad_(False)
    torch.manual_seed(5)
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable()
    calls = record_calls(model, "encoder.layers.1.fc1")

    torch.manual_seed(5)

    torch.testing.assert_close(gradients(model, batch), expected)
    assert len(calls) == 2  # once on the way forward, once more on the way back


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
