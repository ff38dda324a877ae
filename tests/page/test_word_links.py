"""Parts of lines, and which of them belong together."""

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.inspection.alignments import align_words
from vanilla_transformer_tools.page.served_model import (
    LinkedPair,
    link_parts,
    runs_from_right,
)
from vanilla_transformer_tools.translation import Translator

from ..models import build_variant

LINES = ["ein hund rennt", "a dog runs", "zweihundertfünf", "我喜欢狗"]


@pytest.fixture
def translator():
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320)
    return Translator(build_variant(vocab_size=len(tokenizer)), tokenizer)


def test_parts_are_words_where_there_are_several(translator):
    (pair,) = link_parts(translator, ["ein  hund rennt"], ["a dog"])

    assert pair.source == ("ein", "hund", "rennt")
    assert pair.target == ("a", "dog")
    (expected,) = align_words(translator, ["ein  hund rennt"], ["a dog"])
    assert pair.links == expected.links != ()


@pytest.mark.parametrize("text", ["zweihundertfünf", "我喜欢狗", "我 喜欢 狗", "é😀"])
def test_parts_are_tokens_where_words_have_no_blanks(translator, text):
    (pair,) = link_parts(translator, [text], ["a dog"])

    assert "".join(pair.source) == text.replace(" ", "")
    assert all(part and not part.isspace() for part in pair.source)
    (backwards,) = link_parts(translator, ["a dog"], [text])
    assert backwards.target == pair.source


def test_tokens_of_one_word_are_several_and_pairs_keep_their_order(translator):
    linked = link_parts(translator, ["ein hund", "zweihundertfünfzehn"], ["a", "b c d"])

    assert linked[0].source == ("ein", "hund")
    assert linked[1].target == ("b", "c", "d")
    assert 1 < len(linked[1].source) < len("zweihundertfünfzehn")
    assert link_parts(translator, [], []) == []


def test_parts_of_a_translation_have_those_of_the_line():
    pair = LinkedPair(("ein", "hund", "rennt"), ("a", "dog", "so"), ((0, 0), (1, 1), (2, 1)))

    assert pair.linked() == [("a", "ein"), ("dog", "hund rennt"), ("so ", None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", False), ("أنا a", True), ("1 שלום", True), ("中文", False), ("", False), ("3!", False)],
)
def test_direction_is_that_of_the_first_letter(text, expected):
    assert runs_from_right(text) == expected
