"""Saved = loaded: weights, ties, tables."""

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel

from ..conftest import Model, redraw_parameters, without_labels


@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_loads_with_the_same_logits(tiny_config, batch, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    model.save_pretrained(tmp_path)

    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    assert type(loaded) is VanillaTransformerForConditionalGeneration
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    tables = [loaded.model.encoder.embed_tokens, loaded.model.decoder.embed_tokens]
    assert all(table.weight is loaded.model.shared.weight for table in tables)
    assert (loaded.lm_head.weight is loaded.model.shared.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_saved_file_holds_tied_tensors_once(tiny_config, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = VanillaTransformerForConditionalGeneration(tiny_config)
    model.save_pretrained(tmp_path)

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    outside_layers = {name for name in saved if ".layers." not in name and "norm" not in name}
    assert outside_layers == {"model.shared.weight"} | (set() if tied else {"lm_head.weight"})
    assert saved == {name for name, _ in model.named_parameters()}


def test_bare_model_loads_from_the_complete_one(tiny_model, batch, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    inputs = without_labels(batch)

    loaded = AutoModel.from_pretrained(tmp_path)

    assert type(loaded) is VanillaTransformerModel
    hidden = loaded(**inputs).last_hidden_state
    torch.testing.assert_close(tiny_model.lm_head(hidden), tiny_model(**inputs).logits)


def test_replaced_table_serves_both_stacks(tiny_model):
    table = nn.Embedding(37, 24)

    tiny_model.set_input_embeddings(table)

    assert tiny_model.get_input_embeddings() is table
    assert tiny_model.model.encoder.embed_tokens is table
    assert tiny_model.model.decoder.embed_tokens is table


def test_resized_vocabulary_stays_tied(tiny_model, batch):
    expected = tiny_model(**batch).logits

    tiny_model.resize_token_embeddings(41, mean_resizing=False)

    logits = tiny_model(**batch).logits
    assert logits.shape == (3, 5, 41)
    torch.testing.assert_close(logits[..., :37], expected)
    assert tiny_model.lm_head.weight is tiny_model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_keys_that_no_file_holds_are_named_for_trainer(tiny_config, tmp_path, tied):
    tiny_config.tie_word_embeddings = tied
    model = Model(tiny_config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())

    # Trainer warns of lost weights unless the two are equal.
    assert set(model._keys_to_ignore_on_save) == model.state_dict().keys() - saved
