"""The options of a saved tokenizer are those that it was trained with."""

import pytest
from tokenizers import Tokenizer, models

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.text.saved_options import options_of
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

LINES = ["der alte mann schläft , ja .", "the old man sleeps", "한국 é"] * 3


def reloaded(folder, **options):
    tokenizer = VanillaTransformerTokenizer.train(LINES, **{"vocab_size": 300, **options})
    tokenizer.save_pretrained(folder)
    return TokenizerPair.from_pretrained(str(folder))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
def test_kind_and_size_are_read_off_a_saved_tokenizer(kind, tmp_path):
    pair = reloaded(tmp_path, kind=kind)

    options = options_of(pair)

    assert (options["tokenizer_kind"], options["vocab_size"]) == (kind, len(pair.source))
    assert not options["pretokenized"]
    assert options["unicode_form"] is None


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_of_a_saved_tokenizer_may_be_tokenised(kind, tmp_path):
    assert options_of(reloaded(tmp_path, kind=kind, pretokenized=True))["pretokenized"]


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_form_is_read_off_a_saved_tokenizer(kind, tmp_path):
    options = options_of(reloaded(tmp_path, kind=kind, unicode_form="NFD"))

    assert (options["unicode_form"], options["tokenizer_kind"]) == ("NFD", kind)


def test_sides_of_a_saved_model_may_have_a_tokenizer_each(tmp_path):
    joint = reloaded(tmp_path)
    separate = TokenizerPair(joint.source, reloaded(tmp_path).source)

    assert not options_of(joint)["separate_vocabularies"]
    assert options_of(separate)["separate_vocabularies"]


def test_pipeline_of_another_library_counts_as_pieces():
    tokenizer = VanillaTransformerTokenizer(tokenizer_object=Tokenizer(models.BPE()))

    options = options_of(TokenizerPair.joint(tokenizer))

    assert (options["tokenizer_kind"], options["pretokenized"]) == ("bpe", False)
