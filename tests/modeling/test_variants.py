"""The switches of the config: each does what it says and keeps the guarantees of the default."""

import math
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM
from transformers.activations import ACT2FN

from vanilla_transformer import VanillaTransformerConfig

from ..conftest import (
    LEARNED,
    RECTANGULAR,
    TINY,
    TWO_TABLES,
    UNTIED,
    VARIANTS,
    Batch,
    Model,
    assert_loaded,
    build_variant,
    each_variant,
    gradients,
    source_of,
)

TYINGS = {
    "shared": {},
    "shared_untied": UNTIED,
    "two_tables": TWO_TABLES,
    "two_tables_untied": {**TWO_TABLES, **UNTIED},
    "two_vocabularies": {**TWO_TABLES, "decoder_vocab_size": 41},
    "two_vocabularies_untied": {**TWO_TABLES, **UNTIED, "decoder_vocab_size": 41},
}
each_tying = pytest.mark.parametrize("tying", TYINGS.values(), ids=TYINGS)
with_bias = pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])


def fresh_states(changes: dict[str, Any], batch: Batch) -> tuple[Model, list[Tensor], list[Tensor]]:
    """A fresh model, whose norms neither scale nor shift, and the states behind each layer."""
    torch.manual_seed(1)
    model = Model(VanillaTransformerConfig(**{**TINY, **changes})).eval()
    output = model(**batch, output_hidden_states=True)
    return model, list(output.encoder_hidden_states[1:]), list(output.decoder_hidden_states[1:])


def is_normalised(states: Tensor) -> bool:
    mean, variance = states.mean(dim=-1), states.var(dim=-1, correction=0)
    return bool(mean.abs().max() < 1e-5 and (variance - 1).abs().max() < 1e-3)


def test_layers_end_in_a_norm_with_post_norm_only(batch):
    _, *post_norm = fresh_states({"pre_norm": False}, batch)
    _, *pre_norm = fresh_states({"add_final_layer_norm": False}, batch)

    assert all(is_normalised(states) for stack in post_norm for states in stack)
    assert not any(is_normalised(states) for stack in pre_norm for states in stack)


@pytest.mark.parametrize(
    ("changes", "has_norm"),
    [
        ({}, True),
        ({"add_final_layer_norm": True}, True),
        ({"add_final_layer_norm": False}, False),
        ({"pre_norm": False}, False),
        ({"pre_norm": False, "add_final_layer_norm": False}, False),
    ],
    ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) else str(value),
)
def test_stacks_close_with_a_norm_when_told_to(batch, changes, has_norm):
    model, encoder, decoder = fresh_states(changes, batch)

    names = {name for name, _ in model.named_parameters()}
    for stack in ("encoder", "decoder"):
        assert (f"model.{stack}.layer_norm.weight" in names) == has_norm
    if changes.get("pre_norm", True):
        assert is_normalised(encoder[-1]) == is_normalised(decoder[-1]) == has_norm


@each_tying
@with_bias
def test_tables_are_tied_as_told(tying, bias):
    model = build_variant(**tying, lm_head_bias=bias)

    encoder, decoder = (
        stack.embed_tokens.weight for stack in (model.model.encoder, model.model.decoder)
    )
    is_shared = tying.get("share_encoder_decoder_embeddings", True)
    is_tied = tying.get("tie_word_embeddings", True)
    vocabulary = tying.get("decoder_vocab_size", 37)
    assert (encoder is decoder) == is_shared
    assert (model.lm_head.weight is decoder) == is_tied
    assert (encoder.shape[0], decoder.shape[0]) == (37, vocabulary)
    assert model.lm_head.weight.shape == (vocabulary, 24)
    assert (model.lm_head.bias is not None) == bias
    assert model.get_input_embeddings().weight is encoder
    assert model.get_output_embeddings() is model.lm_head


@each_tying
@with_bias
def test_saved_model_loads_with_the_same_ties_and_logits(batch, tmp_path, tying, bias):
    model = build_variant(**tying, lm_head_bias=bias)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    own = {name for name, _ in model.named_parameters()}
    assert saved == own == {name for name, _ in loaded.named_parameters()}
    assert set(model._keys_to_ignore_on_save) == model.state_dict().keys() - saved
    assert_loaded(loaded, model, batch)


@each_tying
@with_bias
def test_parameters_without_embeddings_are_counted_for_every_tying(tying, bias):
    def count(**changes: Any) -> tuple[int, int]:
        model = build_variant(**{**tying, "lm_head_bias": bias, **changes})
        return model.num_parameters(), model.num_parameters(exclude_embeddings=True)

    total, rest = count()

    vocabulary = tying.get("decoder_vocab_size", 37)
    tables = 37 * 24
    if not tying.get("share_encoder_decoder_embeddings", True):
        tables += vocabulary * 24
    assert total - rest == tables
    layers = sum(
        parameter.numel()
        for name, parameter in build_variant().named_parameters()
        if "layer" in name
    )
    projection = 0 if tying.get("tie_word_embeddings", True) else vocabulary * 24
    assert rest == layers + projection + (vocabulary if bias else 0)


@pytest.mark.parametrize("tied", [True, False])
def test_resized_vocabulary_keeps_its_ties_and_bias(batch, tied):
    model = build_variant(tie_word_embeddings=tied, lm_head_bias=True)
    expected = model(**batch).logits

    model.resize_token_embeddings(43, mean_resizing=False)

    logits = model(**batch).logits
    assert logits.shape == (3, 5, 43)
    torch.testing.assert_close(logits[..., :37], expected)
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) == tied


def test_replaced_table_of_the_source_leaves_that_of_the_target():
    model = build_variant(**TWO_TABLES)
    table, target_table = torch.nn.Embedding(50, 24), model.model.decoder.embed_tokens

    model.set_input_embeddings(table)

    assert model.get_input_embeddings() is model.model.encoder.embed_tokens is table
    assert model.model.decoder.embed_tokens is target_table
    assert model.lm_head.weight is target_table.weight


def test_resizing_one_of_two_tables_is_refused():
    model = build_variant(**TWO_TABLES)

    with pytest.raises(ValueError, match=r"source and target share, got .* two tables and 43"):
        model.resize_token_embeddings(43)


@pytest.mark.parametrize(
    ("changes", "qkv", "q", "kv", "out"),
    [
        ({}, 72, 24, 48, 24),
        ({"d_k": 5}, 4 * 16, 20, 20 + 24, 24),
        ({"d_v": 7}, 24 + 24 + 28, 24, 24 + 28, 28),
        ({"talking_heads": "both", "key_heads": 3, "value_heads": 6}, 72, 24, 48, 24),
        ({**RECTANGULAR, "d_k": 5, "d_v": 7}, 15 + 15 + 42, 15, 15 + 42, 42),
    ],
    ids=["default", "d_k", "d_v", "heads", "all"],
)
def test_projections_are_as_wide_as_their_heads_together(changes, qkv, q, kv, out):
    layer = build_variant(**changes).model.decoder.layers[0]

    assert layer.self_attn.qkv_proj.weight.shape == (qkv, 24)
    assert layer.encoder_attn.q_proj.weight.shape == (q, 24)
    assert layer.encoder_attn.kv_proj.weight.shape == (kv, 24)
    for attention in (layer.self_attn, layer.encoder_attn):
        assert attention.out_proj.weight.shape == (24, out)


@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_attention_have_biases_when_told_to(bias):
    names = {name for name, _ in build_variant(attention_bias=bias).named_parameters()}

    for module in ("self_attn.qkv_proj", "self_attn.out_proj"):
        assert (f"model.encoder.layers.0.{module}.bias" in names) == bias
    for module in ("q_proj", "kv_proj", "out_proj"):
        assert (f"model.decoder.layers.0.encoder_attn.{module}.bias" in names) == bias
    assert "model.encoder.layers.0.fc1.bias" in names


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_every_activation_of_transformers_trains_and_loads(batch, tmp_path, name):
    model = build_variant(activation_function=name)
    seen: list[Tensor] = []
    layer = model.model.decoder.layers[1]
    layer.fc1.register_forward_hook(lambda _, inputs, output: seen.append(output))
    layer.fc2.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))

    found = gradients(model, batch)

    torch.testing.assert_close(seen[1], layer.activation(seen[0]))
    assert type(layer.activation) is type(ACT2FN[name])
    assert all(gradient.isfinite().all() for gradient in found.values())
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert_loaded(loaded, model, batch)


@pytest.mark.parametrize("depth_scaled", [False, True])
def test_matrices_and_tables_start_with_the_chosen_deviation(depth_scaled):
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        **{
            **TINY,
            **LEARNED,
            **TWO_TABLES,
            **UNTIED,
            "vocab_size": 1000,
            "d_model": 64,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 300,
            "talking_heads": "both",
            "init_std": 0.02,
            "depth_scaled_init": depth_scaled,
        }
    )
    model = Model(config)

    for name, parameter in model.named_parameters():
        if name.endswith("_mixing.weight"):
            assert torch.equal(parameter, torch.eye(len(parameter))), name
        elif parameter.dim() == 2:
            depth = int(name.split("layers.")[1][0]) + 1 if "layers." in name else 1
            expected = 0.02 / math.sqrt(depth) if depth_scaled else 0.02
            # 4096 entries or more leave 4 % of play; one row of 1000 may be zero.
            torch.testing.assert_close(parameter.std().item(), expected, rtol=0.05, atol=0)
            # Normal: some entries of thousands lie past what a uniform distribution has.
            assert parameter.abs().max() > 2.5 * expected, name
        else:
            value = 1.0 if name.endswith("norm.weight") else 0.0
            assert (parameter == value).all(), name


@pytest.mark.parametrize("d_k", [16, 64])
def test_logical_matrices_start_xavier_uniform_when_head_sizes_are_free(d_k):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_k": d_k, "d_v": 24, "attention_bias": False}
    model = Model(VanillaTransformerConfig(**{**TINY, **sizes}))

    # Four heads.
    *keys, values = model.model.decoder.layers[0].self_attn.qkv_proj.weight.split(
        [4 * d_k, 4 * d_k, 4 * 24]
    )
    for matrix in (*keys, values):
        bound = math.sqrt(6 / (len(matrix) + 64))
        assert 0.98 * bound < matrix.abs().max() <= bound


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("decoder_vocab_size", [41, 34])
def test_transition_scores_are_log_probabilities_when_vocabularies_differ(
    batch, decoder_vocab_size, num_beams
):
    model = build_variant(**TWO_TABLES, decoder_vocab_size=decoder_vocab_size)
    source = source_of(batch)

    found = model.generate(
        **source,
        num_beams=num_beams,
        max_new_tokens=4,
        min_new_tokens=4,
        return_dict_in_generate=True,
        output_logits=True,
    )
    actual = model.compute_transition_scores(
        found.sequences,
        found.logits,
        found.beam_indices if num_beams > 1 else None,
        normalize_logits=True,
    )

    logits = model(**source, decoder_input_ids=found.sequences[:, :-1]).logits
    expected = logits.log_softmax(dim=-1).gather(-1, found.sequences[:, 1:, None])[..., 0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_beams", [2, 3, 4])
@pytest.mark.parametrize(("source_size", "target_size"), [(37, 6), (6, 37)])
def test_beams_are_as_many_as_the_target_vocabulary_allows(source_size, target_size, num_beams):
    model = build_variant(**TWO_TABLES, vocab_size=source_size, decoder_vocab_size=target_size)
    source = torch.tensor([[5, 3, 4, 2], [4, 4, 5, 2]])
    search = {"num_beams": num_beams, "max_new_tokens": 5}

    cached = model.generate(source, **search)

    assert cached.tolist() == model.generate(source, **search, use_cache=False).tolist()


@each_variant
@pytest.mark.parametrize("num_beams", [1, 3])
def test_cached_generation_is_uncached_generation(batch, changes, num_beams):
    model = build_variant(**changes)
    search = {"num_beams": num_beams, "max_new_tokens": 7}

    cached = model.generate(**source_of(batch), **search)

    uncached = model.generate(**source_of(batch), **search, use_cache=False)
    assert cached.tolist() == uncached.tolist()


# Heads of keys and of values in the decoder; Transformers' static layers have one number for both.
UNEQUAL_HEADS = {
    "talking_more_keys": (8, 4),
    "talking_more_values": (4, 6),
    "talking_rectangular": (3, 6),
    "talking_post_norm": (3, 6),
    "everything": (3, 6),
}


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - UNEQUAL_HEADS.keys()))
def test_static_cache_generates_alike(batch, name):
    model = build_variant(**VARIANTS[name])

    static = model.generate(**source_of(batch), max_new_tokens=7, cache_implementation="static")

    assert static.tolist() == model.generate(**source_of(batch), max_new_tokens=7).tolist()


@pytest.mark.parametrize(("name", "heads"), UNEQUAL_HEADS.items())
def test_static_cache_is_refused_when_keys_and_values_have_unequal_heads(batch, name, heads):
    model = build_variant(**VARIANTS[name])
    keys, values = heads

    message = rf"static cache needs .* got {values} \(`value_heads`\) and {keys} \(`key_heads`\)"
    with pytest.raises(ValueError, match=message):
        model.generate(**source_of(batch), max_new_tokens=7, cache_implementation="static")


@each_variant
def test_variant_survives_saving_and_loading(batch, tmp_path, changes):
    model = build_variant(**changes)
    model.save_pretrained(tmp_path)

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    assert {name: getattr(loaded.config, name) for name in changes} == changes
    assert_loaded(loaded, model, batch)


@each_variant
def test_padding_changes_nothing_in_any_variant(batch, changes):
    model = build_variant(**changes)
    source = source_of(batch)
    target = batch["decoder_input_ids"]
    together = model(**source, decoder_input_ids=target).logits

    for row, is_real in enumerate(source["attention_mask"].bool()):
        alone = model(
            input_ids=source["input_ids"][row : row + 1, is_real],
            decoder_input_ids=target[row : row + 1],
        ).logits[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)


def test_list_of_variants_leaves_no_switch_out():
    defaults = VanillaTransformerConfig()
    elsewhere = {
        *TINY,
        "attention_dropout",
        "activation_dropout",
        "depth_scaled_init",
        "init_std",
        "label_smoothing",
        "use_cache",
        "is_encoder_decoder",
        "model_type",
    }
    elsewhere |= {name for name in VanillaTransformerConfig.__annotations__ if name.endswith("_id")}

    changed = {
        name
        for changes in VARIANTS.values()
        for name, value in changes.items()
        if value != getattr(defaults, name)
    }

    assert set(VanillaTransformerConfig.__annotations__) - elsewhere == changed
