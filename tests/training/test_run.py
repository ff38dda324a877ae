"""The steps of `train`, one at a time."""

import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import MarianConfig

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import has_empty_side
from vanilla_transformer_tools.text.parallel_text import ParallelText
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training import run as training
from vanilla_transformer_tools.training import starting_model
from vanilla_transformer_tools.training.averaging import Outcome
from vanilla_transformer_tools.training.callbacks import StopOnRequest, StoppedBySignalError

from ..support.gradients_of_one_update import build_arguments
from ..support.training_runs import SIZES

PAIRS = Dataset.from_dict({"source": ["a b", "b a"], "target": ["x y z", "z y x w"]})
SETTINGS = TrainSettings(
    config=SIZES, tokenizer_kind="word", vocab_size=6, target_vocab_size=7, max_length=9
)


def build(tmp_path, **changes):
    settings = TrainSettings(**vars(SETTINGS) | changes)
    arguments = build_arguments(tmp_path, label_smoothing_factor=0.25)
    tokenizers, model = starting_model.build_model(settings, arguments, PAIRS, None)
    return tokenizers, model, arguments


def test_new_model_generates_with_the_search_of_the_paper(tmp_path):
    _, model, _ = build(tmp_path)

    search = model.generation_config
    assert (search.num_beams, search.length_penalty) == (4, 0.6)
    # A start token, and 50 tokens more than the longest source has.
    assert search.max_length == 1 + 9 + 50


def test_kept_pairs_are_those_that_no_filter_drops(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("a\tb\nc\tc\na\tb\n", encoding="utf-8")
    filters = {"train": [str(file)], "filter_identical": True}

    assert list(training.kept_pairs(TrainSettings(**filters))) == [("a", "b"), ("a", "b")]
    only = TrainSettings(**filters, filter_duplicates=True)
    assert list(training.kept_pairs(only)) == [("a", "b")]
    with pytest.raises(ValueError, match="must leave at least one pair"):
        list(
            training.kept_pairs(
                TrainSettings(**filters, filter_max_ratio=1, filter_script=["Cyrl", "Cyrl"])
            )
        )


def test_label_smoothing_is_left_to_the_model(tmp_path):
    _, model, arguments = build(tmp_path)

    assert model.config.label_smoothing == 0.25
    assert arguments.label_smoothing_factor == 0.0


@pytest.mark.parametrize(("separate", "sizes"), [(False, (6, 6)), (True, (6, 7))])
def test_tables_have_the_sizes_of_their_vocabularies(tmp_path, separate, sizes):
    tokenizers, model, _ = build(tmp_path, separate_vocabularies=separate)

    assert tokenizers.is_joint != separate
    assert (len(tokenizers.source), len(tokenizers.target)) == sizes
    assert model.get_input_embeddings().num_embeddings == sizes[0]
    assert model.get_output_embeddings().out_features == sizes[1]
    letters = set("".join(tokenizers.target.get_vocab())) & set("ab")
    assert not separate or letters <= set("<pad>")


def test_new_vocabulary_has_the_unicode_form_of_the_settings(tmp_path):
    tokenizers, _, _ = build(tmp_path, unicode_form="NFKC")

    assert tokenizers.source.tokenize("\uff41 b") == ["a", "b"]


@pytest.mark.parametrize("separate", [False, True])
def test_form_is_that_of_both_sides_and_undone(tmp_path, separate):
    sizes = {"tokenizer_kind": "bpe", "vocab_size": 300, "target_vocab_size": 300}
    tokenizers, _, _ = build(tmp_path, **sizes, unicode_form="NFD", separate_vocabularies=separate)

    for tokenizer in (tokenizers.source, tokenizers.target):
        ids = tokenizer("é").input_ids
        assert len(ids) > len(tokenizer("e").input_ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "é"


@pytest.mark.parametrize("separate", [False, True])
def test_new_model_can_have_the_vocabularies_of_a_saved_one(tmp_path, separate):
    for one in build(tmp_path, separate_vocabularies=separate)[:2]:
        one.save_pretrained(tmp_path)

    tokenizers, model, _ = build(
        tmp_path, tokenizer=str(tmp_path), config=[*SIZES, "d_model=8"], vocab_size=99
    )

    saved = TokenizerPair.from_pretrained(str(tmp_path))
    assert tokenizers.contents == saved.contents
    assert model.config.d_model == 8
    assert model.get_input_embeddings().num_embeddings == 6
    assert model.get_output_embeddings().out_features == (7 if separate else 6)


def test_vocabularies_of_a_model_of_another_class_are_refused(tmp_path):
    VanillaTransformerTokenizer.train(["a b"], kind="word", vocab_size=6).save_pretrained(tmp_path)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    MarianConfig(vocab_size=6, **special).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match="got the type 'marian'"):
        build(tmp_path, tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "maker"),
    [({}, "stored"), ({"bpe_dropout": 0.1}, "drawn_each_epoch"), ({"streaming": True}, "streamed")],
)
def test_training_data_are_of_the_kind_that_was_asked_for(tmp_path, monkeypatch, changes, maker):
    for name in ("stored", "drawn_each_epoch", "streamed"):
        monkeypatch.setattr(training, name, lambda *given, name=name: (name, given[0]))

    data = training._build_data(
        TrainSettings(**changes), build_arguments(tmp_path), None, "pairs", "read"
    )

    assert data == (maker, "read" if maker == "streamed" else "pairs")


def test_pass_over_a_stream_leaves_out_what_a_filter_drops(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("a\tb\n\tc\nd\te\n")
    rules = {"never": lambda source, target: False, "empty": has_empty_side}

    kept = training._read_kept(ParallelText((str(file),)), rules)

    assert list(kept) == [("a", "b"), ("d", "e")]


@pytest.mark.parametrize("given", [{}, {"attn_implementation": "eager", "compile_layers": True}])
def test_new_model_is_compiled_and_attends_as_it_is_asked_for(tmp_path, monkeypatch, given):
    compiled = []
    monkeypatch.setattr(starting_model, "compile_layers", compiled.append)
    monkeypatch.setattr(torch.compiler, "reset", lambda: compiled.append("reset"))
    pairs = Dataset.from_dict({"source": ["a b"], "target": ["b a"]})
    settings = TrainSettings(config=SIZES, tokenizer_kind="word", vocab_size=6, **given)

    _, model = starting_model.build_model(settings, build_arguments(tmp_path), pairs, None)

    assert model.config._attn_implementation == given.get("attn_implementation", "sdpa")
    assert compiled == (["reset", model] if "compile_layers" in given else [])


@pytest.mark.parametrize("is_sharded", [False, True])
def test_second_signal_leaves_weights_to_save_unless_they_are_divided(is_sharded):
    error = StoppedBySignalError(signal.SIGINT)

    def train(resume_from_checkpoint):
        raise error

    trainer = SimpleNamespace(
        train=train, is_sharded=is_sharded, add_callback=print, check_weights=list
    )
    leg = SimpleNamespace(trainer=trainer, settings=SETTINGS, checkpoint=None)
    run = partial(training._run, leg, StopOnRequest(None))

    try:
        ended = run()
    except StoppedBySignalError:
        # Other processes may no longer answer. Pytest itself would end with this error.
        ended = None
    assert ended == (None if is_sharded else (Outcome("last update"), error))
