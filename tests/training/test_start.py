"""Tokenizers and model that a run starts with, and the batches of their pairs."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from vanilla_transformer.tokenization_vanilla_transformer import language_tags
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training import start as module
from vanilla_transformer_tools.training.options import new_config

from ..support.training_runs import SIZES

PAIRS = Dataset.from_dict({"source": ["a b", "b a"], "target": ["x y z", "z y x w"]})
SETTINGS = TrainSettings(
    config=SIZES, tokenizer_kind="word", vocab_size=6, target_vocab_size=7, max_length=9
)


def build(pairs=PAIRS, **changes):
    settings = replace(SETTINGS, **changes)
    start = module.load_start(settings)
    config = new_config(settings, start.config)
    return module.build_model(settings, start, config, pairs)


def test_new_model_generates_with_the_search_of_the_paper():
    _, model = build()

    search = model.generation_config
    assert (search.num_beams, search.length_penalty) == (4, 0.6)
    # A start token, and 50 tokens more than the longest source has.
    assert search.max_length == 1 + 9 + 50


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_sublayers_of_a_new_model_add_nothing_at_first_with_muon(optimizer):
    _, model = build(optimizer=optimizer)

    zero = {
        name.split(".", 4)[-1]
        for name, weight in model.named_parameters()
        if name.endswith("weight") and not weight.any()
    }
    outputs = {"self_attn.out_proj.weight", "encoder_attn.out_proj.weight", "fc2.weight"}
    assert zero == (outputs if optimizer == "muon" else set())


def test_config_of_the_plan_stays_as_it_is():
    settings = replace(SETTINGS, separate_vocabularies=True, vocab_size=99)
    config = new_config(settings, None)
    before = config.to_dict()

    _, model = module.build_model(settings, module.NEW, config, PAIRS)

    assert config.to_dict() == before
    assert model.config.vocab_size < config.vocab_size == 99


@pytest.mark.parametrize("separate", [False, True])
def test_sources_in_lower_case_are_learned_so_and_targets_as_they_are(separate):
    pairs = Dataset.from_dict({"source": ["Ab AB ab"], "target": ["Xy XY"]})
    sizes = {"vocab_size": 99, "target_vocab_size": 99 if separate else None}

    tokenizers, _ = build(pairs, separate_vocabularies=separate, lowercase_sources=True, **sizes)

    assert {"ab"} == {word for word in tokenizers.source.get_vocab() if word.lower() == "ab"}
    assert tokenizers.source("AB").input_ids == tokenizers.source("ab").input_ids
    assert tokenizers.target.unk_token_id not in tokenizers.target(text_target="Xy XY").input_ids


def test_tags_are_words_of_the_source_alone_when_vocabularies_are_separate():
    pairs = PAIRS.add_column("tag", ["de", "en"])

    tokenizers, _ = build(pairs, separate_vocabularies=True, tag_column="tag", vocab_size=9)

    assert set(language_tags(tokenizers.source)) == {"de", "en"}
    assert not language_tags(tokenizers.target)


def test_text_that_is_tokenised_is_cut_in_another_way():
    sizes = {"tokenizer_kind": "bpe", "vocab_size": 300}
    plain, tokenised = (build(**sizes, pretokenized=switch)[0] for switch in (False, True))

    assert tokenised.contents != plain.contents


@pytest.mark.parametrize("separate", [False, True])
def test_new_model_can_have_the_vocabularies_of_a_saved_one(tmp_path, separate):
    for one in build(separate_vocabularies=separate):
        one.save_pretrained(tmp_path)

    tokenizers, model = build(tokenizer=str(tmp_path), config=[*SIZES, "d_model=8"], vocab_size=99)

    saved = TokenizerPair.from_pretrained(str(tmp_path))
    assert tokenizers.contents == saved.contents
    assert model.config.d_model == 8
    assert model.get_input_embeddings().num_embeddings == 6
    assert model.get_output_embeddings().out_features == (7 if separate else 6)


@pytest.mark.parametrize("given", [{}, {"attn_implementation": "eager", "compile_layers": True}])
def test_new_model_is_compiled_and_attends_as_it_is_asked_for(monkeypatch, given):
    compiled = []
    monkeypatch.setattr(module, "compile_layers", compiled.append)
    monkeypatch.setattr(torch.compiler, "reset", lambda: compiled.append("reset"))

    _, model = build(**given)

    assert model.config._attn_implementation == given.get("attn_implementation", "sdpa")
    assert compiled == (["reset", model] if "compile_layers" in given else [])
