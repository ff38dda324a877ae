"""Tables of a model: which are one, which are saved, and what replaces them."""

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.activations import ACT2FN

from vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)

from ..conftest import (
    TWO_TABLES,
    UNTIED,
    assert_loaded,
    build_variant,
    gradients,
    without_labels,
)

TYINGS = {
    "shared": {},
    "shared_untied": UNTIED,
    "two_tables": TWO_TABLES,
    "two_tables_untied": {**TWO_TABLES, **UNTIED},
    "two_vocabularies": {**TWO_TABLES, "decoder_vocab_size": 41},
    "two_vocabularies_untied": {**TWO_TABLES, **UNTIED, "decoder_vocab_size": 41},
}


@pytest.mark.parametrize("tying", TYINGS.values(), ids=TYINGS)
def test_tables_are_tied_as_told_and_stay_so_when_saved(batch, tmp_path, tying):
    model = build_variant(**tying, lm_head_bias=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    vocabulary = tying.get("decoder_vocab_size", 37)
    assert_loaded(loaded, model, batch)
    for one in (model, loaded):
        encoder, decoder = (
            stack.embed_tokens.weight for stack in (one.model.encoder, one.model.decoder)
        )
        assert (encoder is decoder) == tying.get("share_encoder_decoder_embeddings", True)
        assert (one.lm_head.weight is decoder) == tying.get("tie_word_embeddings", True)
        assert (encoder.shape, decoder.shape) == ((37, 24), (vocabulary, 24))
        assert one.lm_head.weight.shape == (vocabulary, 24)
        assert one.get_input_embeddings().weight is encoder
        assert one.get_output_embeddings() is one.lm_head


@pytest.mark.parametrize("tied", [True, False])
def test_saved_file_holds_tied_tensors_once(tmp_path, tied):
    model = build_variant(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    outside_layers = {name for name in saved if ".layers." not in name and "norm" not in name}
    assert outside_layers == {"model.shared.weight"} | (set() if tied else {"lm_head.weight"})
    # Trainer warns of lost weights unless the others are named.
    assert set(model._keys_to_ignore_on_save) == model.state_dict().keys() - saved


def test_bare_model_loads_from_the_complete_one(tiny_model, batch, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    inputs = without_labels(batch)

    loaded = AutoModel.from_pretrained(tmp_path)

    assert type(loaded) is VanillaTransformerModel
    hidden = loaded(**inputs).last_hidden_state
    torch.testing.assert_close(tiny_model.lm_head(hidden), tiny_model(**inputs).logits)


@pytest.mark.parametrize("tying", [{}, TWO_TABLES], ids=["shared", "two_tables"])
def test_replaced_table_serves_the_stacks_that_share_it(tying):
    model = build_variant(**tying)
    table, target_table = nn.Embedding(37, 24), model.model.decoder.embed_tokens

    model.set_input_embeddings(table)

    assert model.get_input_embeddings() is model.model.encoder.embed_tokens is table
    assert model.model.decoder.embed_tokens is (target_table if tying else table)


def test_new_model_misses_no_weight_that_files_hold_once(tiny_model):
    # Trainer warns of those that a checkpoint lacks and these names leave out.
    assert tiny_model._keys_to_ignore_on_save == {
        "lm_head.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
    }


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


def test_resizing_one_of_two_tables_is_refused():
    model = build_variant(**TWO_TABLES)

    with pytest.raises(ValueError, match=r"source and target share, got .* two tables and 43"):
        model.resize_token_embeddings(43)


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_every_activation_of_transformers_trains_and_loads(batch, tmp_path, name):
    model = build_variant(activation_function=name)

    found = gradients(model, batch)

    assert all(gradient.isfinite().all() for gradient in found.values())
    assert type(model.model.decoder.layers[1].activation) is type(ACT2FN[name])
    model.eval().save_pretrained(tmp_path)
    assert_loaded(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), model, batch)
