"""Talking heads: plain attention at the start, no leak, and the weights that values get."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from ..models import RECTANGULAR, Model, build_variant, without_labels
from ..support import reference

each_kind = pytest.mark.parametrize("talking_heads", ["logits", "weights", "both"])


def mixings(model: Model) -> dict[str, nn.Module]:
    """The modules that mix; heads that do not talk have one without weights."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith("_mixing") and hasattr(module, "weight")
    }


@each_kind
def test_plain_model_goes_on_with_talking_heads(batch, tmp_path, talking_heads):
    plain = build_variant(attn_implementation="eager")
    plain.save_pretrained(tmp_path)

    talking = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, talking_heads=talking_heads)

    kinds = 2 if talking_heads == "both" else 1
    assert len(mixings(talking)) == kinds * (2 + 2 * 3)
    assert talking.config._attn_implementation == "eager"
    torch.testing.assert_close(talking(**batch).logits, plain(**batch).logits)


def build_negative(changes: dict[str, Any]) -> Model:
    """A model whose mixing matrices have weights of both signs, and negate some maps only."""
    model = build_variant(**changes)
    generator = torch.Generator().manual_seed(9)
    for mixing in mixings(model).values():
        weight = torch.randn(mixing.weight.shape, generator=generator)
        weight[0] = -weight[0].abs()
        mixing.weight.data.copy_(weight)
    return model


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize(
    "changes",
    [{"talking_heads": "logits"}, {"talking_heads": "weights"}, RECTANGULAR],
    ids=["logits", "weights", "rectangular"],
)
def test_row_of_padding_gives_finite_numbers(batch, changes, precision):
    model = build_negative(changes).train()
    if precision != "autocast":
        model.to(getattr(torch, precision))
    batch["attention_mask"][1] = 0
    target_mask = torch.ones_like(batch["decoder_input_ids"])
    target_mask[1] = 0

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        output = model(**batch, decoder_attention_mask=target_mask, return_logits=True)
    output.loss.backward()

    assert output.logits.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


def oracles_maps(model: Model, name: str, states: Tensor, other: Tensor) -> list[Tensor]:
    """What the third token of a sentence `[Q, D]` takes of each value, by the paper's equations.

    The `states` ask in the attention of that name; in cross-attention the `other` ones answer.
    """
    weights = reference.leaves(model.state_dict())
    source = list(other) if name.endswith("encoder_attn") else None
    queries, keys, _ = reference.projections(weights, name, model.config, list(states), source)
    visible = keys[:3] if name.endswith("self_attn") and "decoder" in name else keys
    return reference.attention_weights(weights, name, model.config, queries[2], visible)


@pytest.mark.parametrize(
    "changes",
    [{}, {"talking_heads": "weights"}, RECTANGULAR, {**RECTANGULAR, "d_k": 5, "d_v": 7}],
    ids=["plain", "weights", "rectangular", "sizes"],
)
def test_attention_weights_returned_are_those_of_the_oracle(batch, changes):
    model = build_variant(**changes, attn_implementation="eager").double()
    inputs: dict[str, tuple[Tensor, ...]] = {}
    for name, module in model.named_modules():
        if name.endswith("_attn"):
            module.register_forward_hook(
                lambda _, args, output, name=name: inputs.update({name: args})
            )

    output = model(**without_labels(batch), output_attentions=True)

    found = {
        "encoder.layers.{}.self_attn": output.encoder_attentions,
        "decoder.layers.{}.self_attn": output.decoder_attentions,
        "decoder.layers.{}.encoder_attn": output.cross_attentions,
    }
    for kind, layers in found.items():
        for index, maps in enumerate(layers):
            name = f"model.{kind.format(index)}"
            states, other, *_ = inputs[name]
            # The second source has no padding.
            expected = oracles_maps(model, name, states[1], other[1] if other is not None else [])
            visible = len(expected[0])
            torch.testing.assert_close(maps[1, :, 2, :visible], torch.stack(expected))
            assert not maps[1, :, 2, visible:].any()


@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2", "flex_attention"])
def test_other_kernels_are_refused_when_heads_talk(batch, tmp_path, kernel):
    model = build_variant(talking_heads="both")
    model.save_pretrained(tmp_path)
    asked = {"attn_implementation": kernel}

    for way in (
        lambda: AutoModelForSeq2SeqLM.from_config(copy.deepcopy(model.config), **asked),
        lambda: AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **asked),
        lambda: model.set_attn_implementation({"": kernel}),
    ):
        with pytest.raises(ValueError, match=f"only eager attention forms.* got .*'{kernel}'"):
            way()

    assert model.config._attn_implementation == "eager"
    assert model(**batch).logits.isfinite().all()
