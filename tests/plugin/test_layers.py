"""Positions, attention and dropout: what layers compute, and in which order."""

import copy
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.layers_vanilla_transformer import eager_attention_forward

from ..conftest import (
    LEARNED,
    TINY,
    Model,
    both_attentions,
    build_variant,
    gradients,
    long_inputs,
    pad,
    real_rows,
    record_calls,
    source_of,
    without_labels,
)
from ..support import reference

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is absent"),
]
END_OF_LEARNED = r"(?s)9.*max_position_embeddings.*got .*1\d"


def positions_of(model: Model, length: int) -> Tensor:
    """What the encoder adds to the tokens of a sentence, `[length, D]`: it reads empty lookups."""
    nothing = torch.zeros(1, length, model.config.d_model, dtype=model.dtype)
    output = model.model.encoder(inputs_embeds=nothing, output_hidden_states=True)
    return output.hidden_states[0][0].detach()


def test_sinusoids_are_those_of_the_worked_example():
    # Four positions, width 4, base 100.
    model = build_variant(d_model=4, encoder_attention_heads=2, position_base=100).double()

    torch.testing.assert_close(
        positions_of(model, 4),
        torch.tensor(
            [
                [0, 1, 0, 1],
                [0.84147098, 0.54030231, 0.09983342, 0.99500417],
                [0.90929743, -0.41614684, 0.19866933, 0.98006658],
                [0.14112001, -0.9899925, 0.29552021, 0.95533649],
            ],
            dtype=torch.float64,
        ),
        rtol=0,
        atol=5e-9,  # the example is rounded to eight digits
    )


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_concatenated"])
def test_sinusoid_further_on_is_a_fixed_linear_map(kind):
    # Wavelengths of 6 to 100 positions, so that 64 of them determine the map.
    model = build_variant(d_model=8, position_embedding_type=kind, position_base=40).double()
    positions = positions_of(model, 256)

    for distance in (1, 5, 40):
        map_of_distance = torch.linalg.lstsq(
            positions[:64], positions[distance : 64 + distance]
        ).solution
        torch.testing.assert_close(positions[:-distance] @ map_of_distance, positions[distance:])


def from_meta(model: Model, folder: Path, dtype: torch.dtype) -> Model:
    with torch.device("meta"):
        empty = Model(model.config)
    loaded = empty.to_empty(device="cpu").to(dtype)
    loaded.load_state_dict(model.state_dict())
    return loaded


OBTAIN: dict[str, Callable[[Model, Path, torch.dtype], Model]] = {
    "from_pretrained": lambda model, folder, dtype: type(model).from_pretrained(
        folder, dtype=dtype
    ),
    "device_map": lambda model, folder, dtype: type(model).from_pretrained(
        folder, dtype=dtype, device_map="cpu"
    ),
    "to": lambda model, folder, dtype: model.to(dtype),
    "deepcopy": lambda model, folder, dtype: copy.deepcopy(model.to(dtype)),
    "pickle": lambda model, folder, dtype: pickle.loads(pickle.dumps(model.to(dtype))),
    "meta": from_meta,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", OBTAIN)
@torch.no_grad()
def test_sinusoids_are_exact_far_out_however_the_model_came(tiny_model, tmp_path, dtype, way):
    tiny_model.save_pretrained(tmp_path)
    model = OBTAIN[way](tiny_model, tmp_path, dtype).eval()

    actual = positions_of(model, 2048)

    assert actual.dtype == dtype
    for position in (0, 3, 2047):
        # Half a step of bfloat16 below 1; the angles themselves are taken in float32.
        torch.testing.assert_close(
            actual[position].double(), reference.sinusoid(position, 24), rtol=0, atol=2e-3
        )


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=needs_gpu)])
def test_positions_are_made_where_the_inputs_are(batch, kind, device):
    model = build_variant(position_embedding_type=kind).to(device)
    # Transformers looks into a mask, which "meta" has no values for.
    inputs = {name: batch[name].to(device) for name in ("input_ids", "decoder_input_ids")}

    logits = model(**inputs).logits

    assert logits.device.type == device


@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_model_reads_and_writes_past_max_position_embeddings(
    tiny_model, batch, cache_implementation
):
    settings: dict[str, Any] = {"min_new_tokens": 9, "max_new_tokens": 9}
    settings["cache_implementation"] = cache_implementation
    expected = tiny_model.generate(**source_of(batch), **settings)
    logits = tiny_model(**without_labels(batch)).logits

    tiny_model.config.max_position_embeddings = 4
    actual = tiny_model.generate(**source_of(batch), **settings)

    assert actual.shape == (3, 10)
    assert actual.tolist() == expected.tolist()
    assert torch.equal(tiny_model(**without_labels(batch)).logits, logits)


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


def test_unconfigured_generation_stops_at_the_end_of_learned_positions(batch):
    model = build_variant(**LEARNED)
    model.generation_config.eos_token_id = None

    assert model.generate(**source_of(batch)).shape == (3, 9)


@both_attentions
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "autocast"])
def test_row_of_padding_gives_finite_numbers(tiny_model, batch, attention, precision):
    tiny_model.set_attn_implementation(attention)
    if precision != "autocast":
        tiny_model.to(getattr(torch, precision))
    batch["attention_mask"][1] = 0
    target_mask = torch.ones_like(batch["decoder_input_ids"])
    target_mask[1] = 0

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        output = tiny_model.train()(**batch, decoder_attention_mask=target_mask, return_logits=True)
    output.loss.backward()

    assert output.logits.isfinite().all()
    for name, parameter in tiny_model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@both_attentions
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_for_a_sentence_is_that_for_it_alone(
    tiny_model, batch, attention, num_beams, side
):
    tiny_model.set_attn_implementation(attention)
    sources = real_rows(batch["input_ids"], batch["attention_mask"])
    input_ids, attention_mask = pad(sources, side, extra=3, filler=7)
    search = {"num_beams": num_beams, "max_new_tokens": 8}

    together = tiny_model.generate(input_ids=input_ids, attention_mask=attention_mask, **search)

    for source, row in zip(sources, together.tolist(), strict=True):
        alone = tiny_model.generate(input_ids=source[None], **search)[0].tolist()
        assert row[: len(alone)] == alone
        # Beam search fills up with `</s>`: Transformers takes the padding id 0 for none.
        assert not set(row[len(alone) :]) - {0, 2}


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_goes_on_from_prefixes_padded_on_the_left(
    tiny_model, batch, num_beams, cache_implementation
):
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


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_from_embeddings_is_that_from_ids(tiny_model, batch, num_beams):
    search = {"num_beams": num_beams, "max_new_tokens": 8}
    source = source_of(batch)
    expected = tiny_model.generate(**source, **search)
    embeddings = tiny_model.get_input_embeddings()(source.pop("input_ids"))

    actual = tiny_model.generate(inputs_embeds=embeddings, **source, **search)

    assert actual.tolist() == expected.tolist()


handed: list[tuple[Tensor, Tensor, float]] = []


def look_at_scores(
    module: nn.Module, query: Tensor, key: Tensor, *args: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Eager attention that keeps what it is handed."""
    handed.append((query.detach(), key.detach(), scaling))
    return eager_attention_forward(module, query, key, *args, scaling=scaling, **kwargs)


AttentionInterface.register("look_at_scores", look_at_scores)
AttentionMaskInterface.register("look_at_scores", eager_mask)


@pytest.fixture(autouse=True)
def nothing_handed() -> Iterator[None]:
    """Every test begins with an empty list."""
    handed.clear()
    yield
    handed.clear()


@pytest.mark.parametrize("heads", [1, 16])
def test_softmax_inputs_start_with_unit_variance(heads):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 12, "decoder_layers": 12}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
    model = Model(VanillaTransformerConfig(**{**TINY, **sizes})).eval()
    model.set_attn_implementation("look_at_scores")

    model(**long_inputs())

    raw = torch.stack([(query @ key.transpose(-2, -1)).square().mean() for query, key, _ in handed])
    scaled = raw * torch.tensor([scaling**2 for *_, scaling in handed])
    assert len(raw) == 36
    # Entries that share a matrix are not independent: over seeds the mean spreads by 0.03 to 0.1.
    torch.testing.assert_close(scaled.mean().item(), 1.0, rtol=0.25, atol=0)
    torch.testing.assert_close(raw.mean().item(), float(64 // heads), rtol=0.25, atol=0)


@pytest.mark.parametrize(("d_k", "scaling"), [(None, 6**-0.5), (5, 5**-0.5), (16, 0.25)])
def test_scores_are_divided_by_the_root_of_the_key_size(batch, d_k, scaling):
    model = build_variant(encoder_attention_heads=4, d_k=d_k, d_v=7)
    model.set_attn_implementation("look_at_scores")

    model(**batch)

    assert [used for _, _, used in handed] == pytest.approx([scaling] * 8)


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


def assert_is_distribution(weights: Tensor, shape: tuple[int, ...]) -> None:
    assert weights.shape == shape
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(shape[:-1]))


@both_attentions
def test_attention_weights_are_distributions_over_real_tokens(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)

    output = tiny_model(**batch, output_attentions=True)

    assert len(output.encoder_attentions) == 2
    assert len(output.decoder_attentions) == len(output.cross_attentions) == 3
    is_padding = batch["attention_mask"] == 0
    for weights in output.encoder_attentions:
        assert_is_distribution(weights, (3, 2, 7, 7))
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()
    for weights in output.decoder_attentions:
        assert_is_distribution(weights, (3, 4, 5, 5))
        assert not weights.triu(diagonal=1).any()
    for weights in output.cross_attentions:
        assert_is_distribution(weights, (3, 4, 5, 7))
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()


def test_asking_for_attention_weights_changes_nothing_else(tiny_model, batch):
    expected = tiny_model(**batch).logits
    configs = [m.config for m in tiny_model.modules() if hasattr(m, "config")]
    before = [config.to_dict() for config in configs]

    asked = tiny_model(**batch, output_attentions=True).logits
    afterwards = tiny_model(**batch)

    torch.testing.assert_close(asked, expected)
    assert torch.equal(afterwards.logits, expected)
    assert afterwards.encoder_attentions is None
    assert [config.to_dict() for config in configs] == before
    assert {config._attn_implementation for config in configs} == {"sdpa"}


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
