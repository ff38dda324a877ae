"""Word alignments: whose words are linked, and how links are written."""

from dataclasses import replace

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.inspection.alignments import align_words
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.engine import ForcedPass
from vanilla_transformer_tools.translation.teacher_forcing import PAIRS_PER_BATCH
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

# Words that have no piece of their own are spelled in characters.
LINES = ["ein hund rennt", "a dog runs", "der mann", "the man"]


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(LINES * 2, vocab_size=290)


@pytest.fixture
def translator(tiny_model, tokenizer):
    tiny_model.resize_token_embeddings(len(tokenizer))
    return Translator(tiny_model, tokenizer)


def look_at(monkeypatch, positions):
    """Lets each token of each target look at the position that a function tells."""

    def force(self, sources, targets, *, align, end_length):
        assert (align, end_length) == (True, 1)
        for source, target in zip(sources, targets, strict=True):
            places = [positions(source, place) for place in range(len(target))]
            yield ForcedPass([0.0] * len(target), places)

    monkeypatch.setattr(TorchEngine, "force", force)


def test_words_are_linked_by_the_tokens_that_look_at_each_other(translator, tokenizer, monkeypatch):
    source, target = "ein hund  rennt", "a dog runs"
    spans = tokenizer(source, return_offsets_mapping=True)["offset_mapping"]
    written = tokenizer(text_target=target, return_offsets_mapping=True)["offset_mapping"]
    words = [len(source[:end].split()) - 1 for _, end in spans]

    def position(_, place):
        return words.index([0, 2, 1][target[: written[place][1]].count(" ")])

    look_at(monkeypatch, position)
    (alignment,) = align_words(translator, [source], [target])

    assert len(written) > 4
    assert str(alignment) == "0-0 1-2 2-1"


def test_alignment_is_that_of_the_engine(translator):
    pairs = [("ein hund rennt", "a dog runs"), ("der mann", "the man"), ("hund", "the old dog")]
    sources, targets = zip(*pairs * PAIRS_PER_BATCH, strict=True)

    together = list(align_words(translator, sources, targets))
    alone = [next(align_words(translator, [source], [target])) for source, target in pairs]

    assert len(together) == len(sources)
    assert together[:3] == together[-3:] == alone
    assert len({str(one) for one in alone}) == 3


def test_tag_and_ends_are_no_words(translator, monkeypatch):
    translator.tokenizers = replace(translator.tokenizers, source_prefix=(5,))
    look_at(monkeypatch, lambda source, place: 0 if place else 1)

    alignment, empty = align_words(translator, ["ein hund", "  "], ["a dog", "a dog"])

    assert alignment.links == ((0, 0),)
    assert str(empty) == ""


def test_units_are_words_where_they_are_given(translator, monkeypatch):
    look_at(monkeypatch, lambda source, place: 0)

    (alignment,) = align_words(
        translator, ["hund rennt"], ["dog runs"], (["hu nd rennt"], ["d o g runs"])
    )

    # The first token is at least "hu".
    assert {target for _, target in alignment.links} == {0, 1, 2, 3}
    assert {source for source, _ in alignment.links} <= {0, 1}
    assert (0, 0) in alignment.links


def test_what_cannot_be_aligned_is_refused(translator):
    for targets, units, message in (
        (["a"], (["ein und"], ["a"]), "expected 'ein hund', got 'ein und'"),
        (["a", "b"], None, "same number of lines, got 1, 2, 1, 2"),
    ):
        with pytest.raises(ValueError, match=message):
            list(align_words(translator, ["ein hund"], targets, units))
    translator.engine = object()
    with pytest.raises(ValueError, match=r"engine 'torch'.* got object"):
        list(align_words(translator, ["ein"], ["a"]))
