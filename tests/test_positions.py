"""Positions: exact wherever the model came from, without an end, unmoved by padding."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerForConditionalGeneration

from . import reference
from .conftest import Model, both_attentions, pad, real_rows, source_of, without_labels


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
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_row_of_padding_gives_finite_numbers(tiny_model, batch, attention, precision):
    tiny_model.set_attn_implementation(attention)
    if precision == "bfloat16":
        tiny_model.bfloat16()
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


def test_model_reads_and_writes_past_max_position_embeddings(tiny_model, batch):
    inputs = without_labels(batch)
    expected = tiny_model(**inputs).logits
    tiny_model.config.max_position_embeddings = 4

    assert torch.equal(tiny_model(**inputs).logits, expected)
    generated = tiny_model.generate(**source_of(batch), min_new_tokens=9, max_new_tokens=9)
    assert generated.shape == (3, 10)
