"""Talking heads: plain attention at the start, no leak, and the weights that values get."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig

from ..conftest import (
    RECTANGULAR,
    TINY,
    Model,
    assert_loaded,
    build_variant,
    gradients,
    long_inputs,
    source_of,
    without_labels,
)
from ..support import reference

TALKS = ["logits", "weights", "both"]


def mixings(model: Model) -> dict[str, nn.Module]:
    """The modules that mix; where heads do not talk, something without weights stands there."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith("_mixing") and hasattr(module, "weight")
    }


@torch.no_grad()
@pytest.mark.parametrize(("key_heads", "d_k"), [(2, 3), (4, 2)])
def test_score_map_of_a_head_has_at_most_the_rank_of_its_key_size(key_heads, d_k):
    model = build_variant(talking_heads="logits", key_heads=key_heads, d_k=d_k).double()
    mixing = model.model.encoder.layers[0].self_attn.logits_mixing
    maps: list[tuple[Tensor, Tensor]] = []
    mixing.register_forward_hook(lambda _, inputs, output: maps.append((inputs[0], output)))

    model(**long_inputs(20))

    ((of_heads, mixed),) = maps
    assert of_heads.shape == (2, key_heads, 20, 20)
    assert torch.linalg.matrix_rank(of_heads).unique().tolist() == [d_k]
    assert torch.linalg.matrix_rank(mixed).unique().tolist() == [key_heads * d_k]


@pytest.mark.parametrize("talking_heads", TALKS)
def test_talking_heads_start_as_the_plain_model(batch, talking_heads):
    plain = build_variant()
    plain.set_attn_implementation("eager")
    torch.manual_seed(0)
    talking = Model(VanillaTransformerConfig(**{**TINY, "talking_heads": talking_heads})).eval()

    lost = talking.load_state_dict(plain.state_dict(), strict=False)

    kinds = 2 if talking_heads == "both" else 1
    assert len(lost.missing_keys) == len(mixings(talking)) == kinds * (2 + 2 * 3)
    assert all(name.endswith("_mixing.weight") for name in lost.missing_keys)
    assert torch.equal(talking(**batch).logits, plain(**batch).logits)


@pytest.mark.parametrize("talking_heads", TALKS)
def test_plain_model_goes_on_with_talking_heads(batch, tmp_path, talking_heads):
    plain = build_variant()
    plain.save_pretrained(tmp_path)

    talking = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, talking_heads=talking_heads)

    torch.testing.assert_close(talking(**batch).logits, plain(**batch).logits)
    for mixing in mixings(talking).values():
        assert torch.equal(mixing.weight, torch.eye(len(mixing.weight)))


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "logits_mixing", "weights_mixing"),
    [
        (2, 1, [[1, 0], [0, 1], [1, 0], [0, 1]], [[1, 0, 0, 0]]),
        (
            6,
            6,
            [[int(row == column) for column in range(6)] for row in range(4)],
            [[int(row % 4 == column) for column in range(4)] for row in range(6)],
        ),
    ],
    ids=["fewer", "more"],
)
def test_rectangular_mixing_starts_as_a_truncated_or_repeated_identity(
    key_heads, value_heads, logits_mixing, weights_mixing
):
    model = Model(
        VanillaTransformerConfig(
            **TINY, talking_heads="both", key_heads=key_heads, value_heads=value_heads
        )
    )

    for layer in model.model.decoder.layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            assert attention.logits_mixing.weight.tolist() == logits_mixing
            assert attention.weights_mixing.weight.tolist() == weights_mixing


@pytest.mark.parametrize("changes", [{}, RECTANGULAR], ids=["square", "rectangular"])
@pytest.mark.parametrize("talking_heads", TALKS)
def test_mixing_learns(batch, changes, talking_heads):
    allowed = {"logits": ["key_heads"], "weights": ["value_heads"]}.get(talking_heads, [*changes])
    changes = {name: value for name, value in changes.items() if name in allowed}
    model = build_variant(**{**changes, "talking_heads": talking_heads})

    found = gradients(model, batch)

    for name in mixings(model):
        assert found[f"{name}.weight"].abs().min() > 0, name


def build_negative(changes: dict[str, Any], precision: torch.dtype) -> Model:
    """A model whose mixing matrices have weights of both signs, and negate some maps only."""
    model = build_variant(**changes).to(precision)
    generator = torch.Generator().manual_seed(9)
    for mixing in mixings(model).values():
        weight = torch.randn(mixing.weight.shape, generator=generator)
        weight[0] = -weight[0].abs()
        mixing.weight.data.copy_(weight)
    return model


each_precision = pytest.mark.parametrize(
    "precision", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"]
)
each_talk = pytest.mark.parametrize(
    "changes",
    [*({"talking_heads": talk} for talk in TALKS), RECTANGULAR],
    ids=[*TALKS, "rectangular"],
)


@each_precision
@each_talk
@torch.no_grad()
def test_negative_mixing_does_not_see_the_future(batch, changes, precision):
    model = build_negative(changes, precision)
    inputs = without_labels(batch)
    before = model(**inputs).logits
    inputs["decoder_input_ids"][:, 3:] = torch.tensor([20, 31])

    after = model(**inputs).logits

    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


@each_precision
@each_talk
@torch.no_grad()
def test_negative_mixing_does_not_see_padding(batch, changes, precision):
    model = build_negative(changes, precision)
    inputs = without_labels(batch)
    before = model(**inputs).logits
    is_padding = inputs["attention_mask"] == 0
    inputs["input_ids"] = inputs["input_ids"].masked_fill(is_padding, 20)

    after = model(**inputs).logits

    assert torch.equal(before, after)
    output = model(**inputs, output_attentions=True)
    for weights in (*output.encoder_attentions, *output.cross_attentions):
        assert not weights.permute(0, 3, 1, 2)[is_padding].any()
    for weights in output.decoder_attentions:
        assert not weights.triu(diagonal=1).any()


@each_precision
@each_talk
def test_row_of_padding_gives_finite_numbers_with_negative_mixing(batch, changes, precision):
    model = build_negative(changes, precision).train()
    batch["attention_mask"][1] = 0
    target_mask = torch.ones_like(batch["decoder_input_ids"])
    target_mask[1] = 0

    output = model(**batch, decoder_attention_mask=target_mask, return_logits=True)
    output.loss.backward()

    assert output.logits.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    "changes",
    [{}, {"talking_heads": "weights"}, RECTANGULAR, {**RECTANGULAR, "d_k": 5, "d_v": 7}],
    ids=["plain", "weights", "rectangular", "sizes"],
)
def test_attention_weights_returned_are_those_applied_to_the_values(batch, changes):
    model = build_variant(**changes).double()
    model.set_attn_implementation("eager")
    calls: dict[str, tuple[Any, ...]] = {}
    for name, module in model.named_modules():
        if name.endswith("_attn"):
            module.register_forward_hook(
                lambda _, args, output, name=name: calls.update({name: (args, output[0])})
            )

    output = model(**without_labels(batch), output_attentions=True)

    weights = reference.leaves(model.state_dict())
    kinds = {
        "encoder.layers.{}.self_attn": output.encoder_attentions,
        "decoder.layers.{}.self_attn": output.decoder_attentions,
        "decoder.layers.{}.encoder_attn": output.cross_attentions,
    }
    for kind, layers in kinds.items():
        for index, maps in enumerate(layers):
            name = f"model.{kind.format(index)}"
            (states, other, *_), attended = calls[name]
            is_cross = name.endswith("encoder_attn")
            heads, d_v = reference.value_rows(name, model.config)
            assert maps.shape[1] == heads
            projection = model.get_submodule(f"{name}.{'kv_proj' if is_cross else 'qkv_proj'}")
            projected = projection(other if is_cross else states)[..., -heads * d_v :]
            values = projected.unflatten(-1, (heads, d_v)).transpose(1, 2)
            joined = (maps @ values).transpose(1, 2).flatten(2)
            torch.testing.assert_close(model.get_submodule(f"{name}.out_proj")(joined), attended)
            # And the last row of the sentence without padding is the oracle's.
            sentences = [list(states[1]), *([list(other[1])] if is_cross else [])]
            make = reference.cross_projections if is_cross else reference.self_projections
            queries, keys, _ = make(weights, name, model.config, *sentences)
            query, keys = (
                queries[2],
                keys[:3] if "decoder.layers" in name and not is_cross else keys,
            )
            expected = reference.attention_weights(weights, name, model.config, query, keys)
            torch.testing.assert_close(maps[1, :, 2, : len(keys)], torch.stack(expected))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_returns_the_weights_of_talking_heads(batch, num_beams):
    model = build_variant(**RECTANGULAR)

    output = model.generate(
        **source_of(batch),
        num_beams=num_beams,
        min_new_tokens=3,
        max_new_tokens=3,
        output_attentions=True,
        return_dict_in_generate=True,
    )

    assert output.encoder_attentions[0].shape == (3, 6, 7, 7)
    for step in range(3):
        assert output.cross_attentions[step][0].shape == (3 * num_beams, 6, 1, 7)
        assert output.decoder_attentions[step][0].shape == (3 * num_beams, 6, 1, step + 1)


KERNELS = ["sdpa", "flash_attention_2", "flex_attention"]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def refusal(kernel: str) -> str:
    return rf"`talking_heads` mix .* only eager attention forms.* must be 'eager', got .*'{kernel}'"


@pytest.mark.parametrize("talking_heads", TALKS)
def test_talking_heads_take_eager_attention_by_themselves(batch, tmp_path, talking_heads):
    model = build_variant(talking_heads=talking_heads)
    model.save_pretrained(tmp_path)

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    assert model.config._attn_implementation == loaded.config._attn_implementation == "eager"
    assert_loaded(loaded, model, batch)


@each_kernel
def test_other_kernels_are_refused_at_construction_when_heads_talk(kernel):
    config = VanillaTransformerConfig(**TINY, talking_heads="both")
    config._attn_implementation = kernel

    with pytest.raises(ValueError, match=refusal(kernel)):
        Model(config)
    with pytest.raises(ValueError, match=refusal(kernel)):
        AutoModelForSeq2SeqLM.from_config(
            VanillaTransformerConfig(**TINY, talking_heads="both"), attn_implementation=kernel
        )


@each_kernel
def test_other_kernels_are_refused_in_loading_when_heads_talk(tmp_path, kernel):
    build_variant(talking_heads="both").save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=refusal(kernel)):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation=kernel)


@each_kernel
@pytest.mark.parametrize("form", ["name", "dict"])
def test_other_kernels_are_refused_later_when_heads_talk(batch, kernel, form):
    model = build_variant(talking_heads="logits")
    expected = model(**batch).logits

    with pytest.raises(ValueError, match=refusal(kernel)):
        model.set_attn_implementation(kernel if form == "name" else {"": kernel})

    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**batch).logits, expected)
