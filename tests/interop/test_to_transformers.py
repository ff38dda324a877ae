"""Our models as models of Transformers' own classes: the same bytes, logits and outputs."""

import json

import pytest
import torch

from vanilla_transformer.interop.importing import compare, convert
from vanilla_transformer.interop.to_transformers import FORMATS, to_transformers

from ..conftest import CONCATENATED, LEARNED, TWO_TABLES, UNTIED, build_variant
from .test_importing import BUILD, refill

# Fields of ours, by the formats that express them.
M2M100 = {**CONCATENATED, "position_offset": 1, "position_base": 10_000 ** (12 / 11)}
BART = {"embedding_layer_norm": True, "position_offset": 2, "lm_head_bias": True}
FITTING = [
    ("pegasus", {}),
    ("pegasus", {"attention_bias": False}),
    ("pegasus", {"decoder_attention_heads": 2, "d_k": 12, "d_v": 12}),
    ("pegasus", {"activation_function": "gelu", "scale_embedding": False}),
    ("pegasus", {"lm_head_bias": True, "add_final_layer_norm": True, **CONCATENATED}),
    ("marian", {"pre_norm": False}),
    ("marian", {"pre_norm": False, "decoder_vocab_size": 41, **TWO_TABLES}),
    ("m2m100", M2M100),
    ("fsmt", {**M2M100, "pre_norm": False, **TWO_TABLES, **UNTIED}),
    ("blenderbot", LEARNED),
    ("bart", {**LEARNED, **BART, "pre_norm": False}),
    ("mbart", {**LEARNED, **BART}),
]
# Fields that no format expresses, and what each would have to be in Pegasus.
UNFIT = [
    ({"layer_norm_eps": 0.01}, "`layer_norm_eps` must be 1e-05, got 0.01."),
    ({"add_final_layer_norm": False}, "`add_final_layer_norm` must be None, got False."),
    ({"position_base": 100}, "`position_base` must be 10000, got 100."),
    ({"position_offset": 3}, "`position_offset` must be 0, got 3."),
    ({"d_k": 7}, "`d_k` must be None, got 7."),
    ({"d_v": 12}, "`d_v` must be None, got 12."),
    ({"talking_heads": "both"}, "`talking_heads` must be None, got 'both'."),
    (UNTIED, "`tie_word_embeddings` must be True, got False."),
]
NAMES = {model_type: name for name, model_type in FORMATS.items()}


def draw(model):
    """Weights of which every one matters; tables of sinusoids stay."""
    learns = getattr(model.config, "position_embedding_type", "learned") == "learned"
    learns &= model.config.model_type not in ("m2m_100", "marian", "pegasus", "fsmt")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if learns or "embed_positions" not in name:
                tensor.copy_(0.3 * torch.randn_like(tensor))
    return model


@pytest.mark.parametrize("source", BUILD)
def test_what_came_in_goes_out_as_it_was(source, tmp_path):
    torch.manual_seed(5)
    original = draw(BUILD[source]().eval())
    original.generation_config.repetition_penalty = 1.5

    back = to_transformers(convert(original), NAMES[original.config.model_type])

    assert type(back) is type(original)
    for name, model in (("before", original), ("after", back)):
        model.save_pretrained(tmp_path / name)
    files = ("model.safetensors", "generation_config.json")
    before, after = (
        [(tmp_path / name / file).read_bytes() for file in files] for name in ("before", "after")
    )
    assert after == before
    assert config_of(tmp_path / "after") == config_of(tmp_path / "before")


def config_of(folder):
    config = json.loads((folder / "config.json").read_text())
    # M2M100 skips layers in training; ours never do.
    return {
        name: value
        for name, value in config.items()
        if value is not None and "layerdrop" not in name
    }


@pytest.mark.parametrize(("name", "fields"), FITTING)
def test_model_of_ours_computes_and_generates_the_same(name, fields):
    model = build_variant(**fields)
    exact = name != "fsmt"
    target = to_transformers(model.double() if exact else model, name)
    if name in ("pegasus", "marian", "m2m100"):
        refill(target)

    comparison = compare(target, model)

    assert comparison.scale > 0.5
    assert comparison.gap < (1e-9 if exact else 1e-5)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]])}
    inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
    for num_beams in (1, 3):
        search = {"num_beams": num_beams, "max_length": 9}
        expected, actual = (one.generate(**inputs, **search).tolist() for one in (model, target))
        assert actual == expected


@pytest.mark.parametrize(("fields", "reason"), UNFIT)
def test_what_no_class_has_is_refused(fields, reason):
    with pytest.raises(ValueError, match=r"pegasus cannot hold this model:\n") as error:
        to_transformers(build_variant(**fields), "pegasus")

    assert str(error.value).splitlines()[1:] == [
        reason,
        "Other formats of Transformers that can: none.",
    ]


def test_all_reasons_are_named_and_what_fits_instead():
    with pytest.raises(ValueError) as error:
        to_transformers(build_variant(), "bart")

    assert str(error.value).splitlines() == [
        "The format bart cannot hold this model:",
        "`pre_norm` must be False, got True.",
        "`embedding_layer_norm` must be True, got False.",
        "`position_embedding_type` must be 'learned', got 'sinusoidal'.",
        "`position_offset` must be 2, got 0.",
        "Other formats of Transformers that can: pegasus.",
    ]


def test_model_of_another_class_is_refused():
    with pytest.raises(ValueError, match="of the type 'marian'. Bring it in first"):
        to_transformers(BUILD["marian"](), "pegasus")


def test_weights_are_copies():
    model = build_variant()
    before = model.lm_head.weight.clone(), model.model.encoder.layers[0].fc1.bias.clone()

    with torch.no_grad():
        for parameter in to_transformers(model, "pegasus").parameters():
            parameter.zero_()

    assert torch.equal(model.lm_head.weight, before[0])
    assert torch.equal(model.model.encoder.layers[0].fc1.bias, before[1])
