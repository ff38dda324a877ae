"""How weights start, are tied, saved and resized."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM
from transformers.activations import ACT2FN

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.layers_vanilla_transformer import NORMS

from ..models import (
    LEARNED,
    TINY,
    TWO_TABLES,
    UNTIED,
    Model,
    assert_loaded,
    build_variant,
    gradients,
)

# Large enough for statistics, with sizes that give each kind of matrix its own bound.
LARGE: dict[str, Any] = {
    **TINY,
    **UNTIED,
    "vocab_size": 1000,
    "d_model": 64,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 160,
}


def build_fresh(**changes: Any) -> Model:
    torch.manual_seed(0)
    return Model(VanillaTransformerConfig(**{**LARGE, **changes})).eval()


def depth_of(name: str) -> int:
    """Number of the layer that holds a parameter, from 1; 1 outside the layers."""
    return int(name.split("layers.")[1].split(".")[0]) + 1 if "layers." in name else 1


@pytest.mark.parametrize(
    "changes",
    [{}, {"depth_scaled_init": True}, {"d_k": 16, "d_v": 24}, {"d_k": 64, "d_v": 24}],
    ids=str,
)
def test_logical_matrices_start_xavier_uniform(changes):
    model = build_fresh(**changes)
    linears = {
        name: module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    # Four heads. Every attention matrix is D x D unless told otherwise; a bound over a fused one
    # would be 0.7 times as wide.
    keys, values = 4 * changes.get("d_k", 16), 4 * changes.get("d_v", 16)
    rows_of = {"qkv_proj": [keys, keys, values], "q_proj": [keys], "kv_proj": [keys, values]}
    for name, module in linears.items():
        rows = rows_of.get(name.rpartition(".")[2], [module.out_features])
        for matrix in module.weight.split(rows):
            bound = math.sqrt(6 / (len(matrix) + module.in_features))
            if "depth_scaled_init" in changes:
                bound /= math.sqrt(depth_of(name))
            assert 0.97 * bound < matrix.abs().max() <= bound, name
            # A uniform distribution; 4096 entries or more leave 3 % of play.
            torch.testing.assert_close(matrix.std().item(), bound / math.sqrt(3), rtol=0.03, atol=0)


@pytest.fixture
def empty_memory_is_nan() -> Iterator[None]:
    """Memory that nobody initialises holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("norm_type", NORMS)
def test_biases_and_norms_start_as_their_classes_do_when_no_file_has_them(
    norm_type, empty_memory_is_nan
):
    config = VanillaTransformerConfig(**TINY, norm_type=norm_type)
    model = Model.from_pretrained(None, config=config, state_dict={})
    fresh = NORMS[norm_type](config.d_model, config.layer_norm_eps).state_dict()

    norms = [module for module in model.modules() if isinstance(module, NORMS[norm_type])]
    assert len(norms) > 6
    for norm in norms:
        # A norm of our own sets its weights in `reset_parameters`, as `HeadMixing` does.
        torch.testing.assert_close(norm.state_dict(), fresh)
    assert not any(x.any() for name, x in model.named_parameters() if name.endswith("bias"))


def test_tables_start_with_lookups_of_unit_variance_and_no_padding():
    model = build_fresh(**LEARNED | {"max_position_embeddings": 999})
    names = ["model.shared", "lm_head"]
    names += [f"model.{stack}.embed_positions" for stack in ("encoder", "decoder")]

    for name in names:
        weight = model.get_submodule(name).weight
        # 64,000 entries leave 1 % of play.
        torch.testing.assert_close(weight[1:].std().item(), 64**-0.5, rtol=0.02, atol=0)
        # Position 0 is no padding.
        assert weight[0].any() == name.endswith("positions"), name


@pytest.mark.parametrize("tied", [True, False])
def test_tables_start_without_padding_when_its_id_is_not_zero(tied):
    model = Model(VanillaTransformerConfig(**TINY, pad_token_id=9, tie_word_embeddings=tied))

    for table in (model.model.shared, model.lm_head):
        assert [row for row in range(37) if not table.weight[row].any()] == [9]


@pytest.mark.parametrize("depth_scaled", [False, True])
def test_matrices_and_tables_start_with_the_chosen_deviation(depth_scaled):
    changes = {**LEARNED, **TWO_TABLES, "max_position_embeddings": 300, "talking_heads": "both"}
    model = build_fresh(**changes, init_std=0.02, depth_scaled_init=depth_scaled)

    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.endswith("_mixing.weight"):
            expected = 0.02 / math.sqrt(depth_of(name)) if depth_scaled else 0.02
            # 4096 entries or more leave 4 % of play; one row of 1000 may be zero.
            torch.testing.assert_close(parameter.std().item(), expected, rtol=0.05, atol=0)
            # Normal: some entries of thousands lie past what a uniform distribution has.
            assert parameter.abs().max() > 2.5 * expected, name


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "logits_mixing", "weights_mixing"),
    [
        (4, 4, torch.eye(4), torch.eye(4)),
        (2, 1, torch.eye(2).repeat(2, 1), torch.eye(4)[:1]),
        (6, 6, torch.eye(4, 6), torch.cat((torch.eye(4), torch.eye(4)[:2]))),
    ],
    ids=["square", "fewer", "more"],
)
def test_mixing_starts_as_an_identity_truncated_or_repeated(
    key_heads, value_heads, logits_mixing, weights_mixing
):
    changes = {"talking_heads": "both", "key_heads": key_heads, "value_heads": value_heads}
    model = Model(VanillaTransformerConfig(**TINY, **changes))

    for layer in model.model.decoder.layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            assert torch.equal(attention.logits_mixing.weight, logits_mixing)
            assert torch.equal(attention.weights_mixing.weight, weights_mixing)


@pytest.mark.parametrize("tying", [{}, TWO_TABLES], ids=["shared", "two_tables"])
def test_replaced_table_serves_the_stacks_that_share_it(tying):
    model = build_variant(**tying)
    table, target_table = nn.Embedding(37, 24), model.model.decoder.embed_tokens

    model.set_input_embeddings(table)

    assert model.get_input_embeddings() is model.model.encoder.embed_tokens is table
    assert model.model.decoder.embed_tokens is (target_table if tying else table)


def test_weights_that_are_tied_no_more_are_saved(tiny_model, batch, tmp_path):
    tiny_model.set_output_embeddings(nn.Linear(24, 37, bias=False))
    expected = tiny_model(**batch).logits

    tiny_model.save_pretrained(tmp_path)

    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch).logits, expected)


def test_tables_that_are_shared_no_more_are_not_saved(tiny_model, tmp_path):
    tiny_model.model.decoder.embed_tokens = nn.Embedding(37, 24)

    with pytest.raises(ValueError, match=r"must share a table, .* got tables of their own"):
        tiny_model.save_pretrained(tmp_path)

    assert not list(tmp_path.iterdir())


def test_target_vocabulary_grows_with_the_table(tmp_path):
    model = build_variant(decoder_vocab_size=37)

    model.resize_token_embeddings(40)
    model.save_pretrained(tmp_path)

    assert model.config.decoder_vocab_size == 40
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight.shape[0] == 40


def test_two_tables_may_be_resized_to_the_size_that_they_have():
    model = build_variant(**TWO_TABLES)
    weights = dict(model.named_parameters())

    table = model.resize_token_embeddings(37)

    assert table is model.get_input_embeddings()
    assert all(one is weights[name] for name, one in model.named_parameters())


@pytest.mark.parametrize("size", [(43,), (37, 8), (None, 8)])
def test_resizing_one_of_two_tables_is_refused(size):
    model = build_variant(**TWO_TABLES)

    with pytest.raises(ValueError, match=rf"share, got .* two tables, {size[0]} tokens"):
        model.resize_token_embeddings(*size)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 37


# The second has parameters of its own.
@pytest.mark.parametrize("name", ["silu", "xielu"])
def test_activations_of_transformers_train_and_load(batch, tmp_path, name):
    model = build_variant(activation_function=name)

    found = gradients(model, batch)

    assert all(gradient.isfinite().all() for gradient in found.values())
    assert type(model.model.decoder.layers[1].activation) is type(ACT2FN[name])
    model.eval().save_pretrained(tmp_path)
    assert_loaded(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), model, batch)
