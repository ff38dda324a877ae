"""Parts of lines, and which of them belong together."""

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.page.served_model import ServedModel, parts_of, runs_from_right
from vanilla_transformer_tools.translation import Translation, Translator

from ..models import build_variant

LINES = ["ein hund rennt", "a dog runs", "zweihundertfünf", "我喜欢狗"]


@pytest.fixture(scope="module", params=["bpe", "unigram", "char", "word"])
def tokenizer(request):
    return VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320, kind=request.param)


def parts(tokenizer, text):
    return parts_of(tokenizer, tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


def test_parts_are_words_where_there_are_several(tokenizer):
    words, numbers = parts(tokenizer, "ein  hund rennt")

    assert words == ["ein", "hund", "rennt"]
    assert {*numbers.values()} == {0, 1, 2}
    # The last one is `</s>`.
    assert len(tokenizer("ein  hund rennt")["input_ids"]) - 1 not in numbers


@pytest.mark.parametrize("text", ["zweihundertfünf", "我喜欢狗", "GPU我喜欢狗", "我 喜欢 狗"])
def test_parts_are_tokens_where_words_have_no_blanks(text):
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320, kind="unigram")

    found, numbers = parts(tokenizer, text)

    assert "".join(found) == text.replace(" ", "")
    assert len(found) == len(numbers) > len(text.split())


def test_bytes_of_a_character_are_one_part():
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320)

    assert parts(tokenizer, "é😀 ja")[0] == ["é😀", "ja"]
    assert parts(tokenizer, "é😀")[0] == ["é", "😀"]


def test_words_of_a_translation_have_those_of_the_line(tokenizer):
    model = ServedModel("a", Translator(build_variant(vocab_size=len(tokenizer)), tokenizer))
    source, target = (
        tuple(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))
        for text in ("ein hund rennt", "a dog runs")
    )
    sources, targets = (
        {number: place for place, number in parts_of(tokenizer, tokens)[1].items()}
        for tokens in (source, target)
    )
    # No word has the end of the line.
    alignment = (
        (sources[2], targets[1]),
        (sources[0], targets[1]),
        (len(source) - 1, targets[2]),
    )

    links = model.links(
        Translation("a dog runs", source_tokens=source, tokens=target, alignment=alignment)
    )

    assert links == [("a", None), ("dog", "ein rennt"), ("runs", None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", False), ("أنا a", True), ("1 שלום", True), ("中文", False), ("", False), ("3!", False)],
)
def test_direction_is_that_of_the_first_letter(text, expected):
    assert runs_from_right(text) == expected
