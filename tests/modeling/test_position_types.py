"""Kinds of positions: what each adds to a token, where it ends, and what is seen without any."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from vanilla_transformer import VanillaTransformerConfig

from ..conftest import CONCATENATED, LEARNED, TINY, Model, build_variant, source_of

SINUSOIDS = ["sinusoidal", "sinusoidal_concatenated"]


def positions_of(model: Model, length: int, stack: str = "encoder") -> Tensor:
    """What a stack adds to the tokens of a sentence, `[length, D]`: it reads empty embeddings."""
    nothing = torch.zeros(1, length, model.config.d_model, dtype=model.dtype)
    if stack == "encoder":
        output = model.model.encoder(inputs_embeds=nothing, output_hidden_states=True)
    else:
        output = model.model.decoder(
            inputs_embeds=nothing, encoder_hidden_states=nothing, output_hidden_states=True
        )
    return output.hidden_states[0][0].detach()


def forget_positions(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """Makes every position of both stacks zero."""
    for stack in (model.model.encoder, model.model.decoder):
        encode = stack.embed_positions.forward
        monkeypatch.setattr(
            stack.embed_positions,
            "forward",
            lambda *args, encode=encode, **kwargs: torch.zeros_like(encode(*args, **kwargs)),
        )


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


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_concatenated_sinusoids_are_those_of_marian(stack):
    marian = MarianSinusoidalPositionalEmbedding(50, 24)

    actual = positions_of(build_variant(**CONCATENATED), 50, stack)

    # Angles up to 50 in float32.
    torch.testing.assert_close(actual, marian.create_weight(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_concatenated_sinusoids_are_those_of_m2m100_when_base_and_offset_are(stack):
    m2m100 = M2M100SinusoidalPositionalEmbedding(60, 24, padding_idx=1)
    half = 24 // 2
    changes = {"position_base": 10_000 ** (half / (half - 1)), "position_offset": 2}

    actual = positions_of(build_variant(**CONCATENATED, **changes), 50, stack)

    expected = m2m100(torch.full((1, 50), 7))[0]
    # Angles up to 50 in float32.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", SINUSOIDS)
def test_sinusoid_further_on_is_a_fixed_linear_map(kind):
    # Wavelengths of 6 to 100 positions, so that 64 of them determine the map.
    model = build_variant(
        d_model=8, position_embedding_type=kind, position_base=40, position_offset=3
    ).double()
    positions = positions_of(model, 256)

    for distance in (1, 5, 40):
        map_of_distance = torch.linalg.lstsq(
            positions[:64], positions[distance : 64 + distance]
        ).solution
        torch.testing.assert_close(positions[:-distance] @ map_of_distance, positions[distance:])


@pytest.mark.parametrize("kind", SINUSOIDS)
def test_product_of_sinusoids_depends_on_their_distance_only(kind):
    positions = positions_of(build_variant(position_embedding_type=kind).double(), 64)

    products = positions @ positions.T

    torch.testing.assert_close(products[:-1, :-1], products[1:, 1:])
    assert products[0, 1:].max() < products[0, 0] - 0.1  # no constant


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_learned_positions_are_rows_of_the_table_of_the_stack(stack, offset):
    model = build_variant(**LEARNED, position_offset=offset)
    table = model.get_parameter(f"model.{stack}.embed_positions.weight")

    assert table.shape == (9 + offset, 24)
    assert torch.equal(positions_of(model, 9, stack), table[offset:])


@pytest.mark.parametrize("offset", [0, 3])
def test_sequence_past_the_end_of_learned_positions_is_refused(batch, offset):
    model = build_variant(**LEARNED, position_offset=offset)
    ids = torch.full((2, 10), 7)
    message = r"(?s)9.*max_position_embeddings.*got .*10"

    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, decoder_input_ids=ids[:, :3])
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids[:, :3], decoder_input_ids=ids)
    model(input_ids=ids[:, :9], decoder_input_ids=ids[:, :9])


def test_padding_takes_no_learned_positions(batch):
    model = build_variant(**LEARNED)
    source = source_of(batch)
    expected = model(**source, decoder_input_ids=batch["decoder_input_ids"]).logits
    wide = {name: F.pad(rows, (6, 0)) for name, rows in source.items()}

    actual = model(**wide, decoder_input_ids=batch["decoder_input_ids"]).logits

    torch.testing.assert_close(actual, expected)


def test_step_past_the_end_of_learned_positions_is_refused_when_cached(batch):
    model = build_variant(**LEARNED)
    source = source_of(batch)
    target = torch.full((3, 9), 7)
    cache = model(**source, decoder_input_ids=target, use_cache=True).past_key_values

    with pytest.raises(ValueError, match=r"(?s)9.*max_position_embeddings.*got .*10"):
        model(**source, decoder_input_ids=target[:, :1], past_key_values=cache)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_generation_past_the_end_of_learned_positions_is_refused(batch, num_beams, cache):
    model = build_variant(**LEARNED)
    settings: dict[str, Any] = {"num_beams": num_beams, "use_cache": cache != "none"}
    if cache == "static":
        settings["cache_implementation"] = "static"

    # The start token and eight more are read, the ninth is only written.
    written = model.generate(**source_of(batch), **settings, min_new_tokens=9, max_new_tokens=9)
    assert written.shape == (3, 10)
    with pytest.raises(ValueError, match=r"(?s)9.*max_position_embeddings.*got .*1\d"):
        model.generate(**source_of(batch), **settings, min_new_tokens=12, max_new_tokens=12)


def test_unconfigured_generation_stops_at_the_end_of_learned_positions(batch):
    model = build_variant(**LEARNED)
    model.generation_config.eos_token_id = None

    assert model.generate(**source_of(batch)).shape == (3, 9)


def test_learned_positions_start_as_large_as_embeddings():
    torch.manual_seed(0)
    changes = {**LEARNED, "max_position_embeddings": 2000}
    model = Model(VanillaTransformerConfig(**{**TINY, **changes}))

    for stack in ("encoder", "decoder"):
        table = model.get_parameter(f"model.{stack}.embed_positions.weight")
        # 48,000 entries leave 1 % of play.
        torch.testing.assert_close(table.std().item(), 24**-0.5, rtol=0.02, atol=0)
        assert table.any(dim=1).all()  # position 0 is no padding


ORDER = torch.tensor([3, 0, 6, 2, 5, 1, 4])


def test_encoder_does_not_see_the_order_without_positions(monkeypatch, batch):
    model = build_variant().double()
    input_ids = batch["input_ids"][1:2]
    encode = model.model.encoder
    assert not torch.allclose(
        encode(input_ids[:, ORDER])[0], encode(input_ids)[0][:, ORDER], atol=0.1
    )

    forget_positions(monkeypatch, model)

    torch.testing.assert_close(encode(input_ids[:, ORDER])[0], encode(input_ids)[0][:, ORDER])


def test_decoder_does_not_see_the_order_of_the_source_without_positions(monkeypatch, batch):
    model = build_variant().double()
    source, target = batch["input_ids"][1:2], batch["decoder_input_ids"][1:2]

    def difference() -> Tensor:
        ordered = model(input_ids=source, decoder_input_ids=target).logits
        shuffled = model(input_ids=source[:, ORDER], decoder_input_ids=target).logits
        return (ordered - shuffled).abs().max()

    assert difference() > 0.1
    forget_positions(monkeypatch, model)
    assert difference() < 1e-12


def test_decoder_does_see_the_order_of_the_target_without_positions(monkeypatch, batch):
    model = build_variant().double()
    source = batch["input_ids"][1:2]
    forget_positions(monkeypatch, model)

    first, second = (
        model(input_ids=source, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        for ids in ([1, 6, 33], [6, 1, 33])
    )

    # Causality is no sense of order at the last position of a first layer, but the next has it.
    assert not torch.allclose(first, second, atol=1e-3)
