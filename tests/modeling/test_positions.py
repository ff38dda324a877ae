"""Positions: exact wherever the model came from, without an end, unmoved by padding."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration

from ..conftest import (
    Model,
    both_attentions,
    build_variant,
    pad,
    real_rows,
    source_of,
    without_labels,
)
from ..support import reference

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is absent"),
]


@both_attentions
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("extra", [0, 6])
def test_logits_of_a_sentence_are_those_it_has_alone(tiny_model, batch, attention, side, extra):
    tiny_model.set_attn_implementation(attention)
    sources = real_rows(batch["input_ids"], batch["attention_mask"])
    targets = real_rows(batch["decoder_input_ids"], batch["labels"] != -100)
    input_ids, attention_mask = pad(sources, side, extra, filler=7)
    decoder_input_ids, decoder_attention_mask = pad(targets, side, extra, filler=7)

    together = tiny_model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_attention_mask,
    ).logits

    alone = [
        tiny_model(input_ids=source[None], decoder_input_ids=target[None]).logits[0]
        for source, target in zip(sources, targets, strict=True)
    ]
    # Contract 3 of the design; logits are of order 1.
    torch.testing.assert_close(
        together[decoder_attention_mask.bool()], torch.cat(alone), rtol=1e-5, atol=1e-5
    )


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
def test_row_of_padding_leaves_the_others_alone(tiny_model, batch, attention):
    tiny_model.set_attn_implementation(attention)
    inputs = without_labels(batch)
    expected = tiny_model(**{name: rows[[0, 2]] for name, rows in inputs.items()}).logits
    inputs["attention_mask"][1] = 0

    actual = tiny_model(**inputs).logits[[0, 2]]

    torch.testing.assert_close(actual, expected)


def from_meta(model: Model, folder: Path, dtype: torch.dtype) -> Model:
    with torch.device("meta"):
        empty = VanillaTransformerForConditionalGeneration(model.config)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", OBTAIN)
@torch.no_grad()
def test_sinusoids_are_exact_far_out_however_the_model_came(tiny_model, tmp_path, dtype, way):
    tiny_model.save_pretrained(tmp_path)
    model = OBTAIN[way](tiny_model, tmp_path, dtype).eval()

    # With empty lookups the first layer's input is the positions alone.
    nothing = torch.zeros(1, 2048, model.config.d_model, dtype=dtype)
    positions = model.model.encoder(inputs_embeds=nothing, output_hidden_states=True)

    actual = positions.hidden_states[0][0]
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


def test_model_reads_past_max_position_embeddings(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits

    tiny_model.config.max_position_embeddings = 4

    assert torch.equal(tiny_model(**inputs).logits, expected)


@pytest.mark.parametrize("cache_implementation", [None, "static"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_model_writes_past_max_position_embeddings(
    tiny_model, batch, num_beams, cache_implementation
):
    settings = {
        "num_beams": num_beams,
        "min_new_tokens": 9,
        "max_new_tokens": 9,
        "cache_implementation": cache_implementation,
    }
    expected = tiny_model.generate(**source_of(batch), **settings)

    tiny_model.config.max_position_embeddings = 4
    actual = tiny_model.generate(**source_of(batch), **settings)

    assert actual.shape == (3, 10)
    assert actual.tolist() == expected.tolist()


@torch.no_grad()
def test_exported_model_takes_lengths_beyond_its_example(tiny_model, batch):
    tiny_model.config.max_position_embeddings = 6
    inputs = without_labels(batch)
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    longer = {
        "input_ids": torch.arange(50).fmod(30).add(4).view(2, 25),
        "attention_mask": torch.ones(2, 25, dtype=torch.long).triu(diagonal=9),
        "decoder_input_ids": torch.arange(80).fmod(31).add(3).view(2, 40),
    }

    exported = torch.export.export(
        tiny_model,
        (),
        kwargs={**inputs, "use_cache": False},
        dynamic_shapes={**dict.fromkeys(inputs, sizes), "use_cache": None},
        strict=False,
    ).module()

    actual = exported(**longer, use_cache=False).logits
    torch.testing.assert_close(actual, tiny_model(**longer, use_cache=False).logits)


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
        row = slice(number, number + 1)
        source = {name: tensor[row] for name, tensor in source_of(batch).items()}
        alone = tiny_model.generate(**source, decoder_input_ids=prefix[None], **search)[0]
        assert together[number, 3:].tolist() == alone[len(prefix) :].tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_from_embeddings_is_that_from_ids(tiny_model, batch, num_beams):
    source = source_of(batch)
    expected = tiny_model.generate(**source, num_beams=num_beams, max_new_tokens=8)
    embeddings = tiny_model.get_input_embeddings()(source.pop("input_ids"))

    actual = tiny_model.generate(
        inputs_embeds=embeddings, **source, num_beams=num_beams, max_new_tokens=8
    )

    assert actual.tolist() == expected.tolist()
