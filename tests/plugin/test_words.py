"""Learning from each word once: the vocabulary is that of whole lines."""

import unicodedata
from collections import Counter

import pytest

from vanilla_transformer import tokenization_vanilla_transformer as module
from vanilla_transformer import words_vanilla_transformer as words
from vanilla_transformer.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
)
from vanilla_transformer.words_vanilla_transformer import count_characters, unused_character

from ..support.odd_text import odd_lines


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pretokenized": True},
        {"kind": "unigram"},
        {"target_languages": ["de"]},
        {"unicode_form": "NFKD"},
        # Not all characters get a token.
        {"vocab_size": 290},
    ],
)
def test_vocabulary_is_that_of_the_trainer_on_whole_lines(options, monkeypatch):
    # Every word twice and more, in lines of their own and in long ones.
    lines = [*odd_lines(150), *odd_lines(60), " ".join(odd_lines(90)), "x" * 1100]
    options = {"vocab_size": 420, **options}
    monkeypatch.setattr(words, "_WORDS_AT_A_TIME", 7)

    found = VanillaTransformerTokenizer.train(lines, **options).backend_tokenizer.to_str()

    if form := options.get("unicode_form"):
        lines = [unicodedata.normalize(form, line) for line in lines]
    with monkeypatch.context() as patched:
        patched.setattr(
            module,
            "learn_from_parts",
            lambda learner, trainer, *_: learner.train_from_iterator(lines, trainer),
        )
        characters = Counter(" " * len(lines) + "".join(lines))
        patched.setattr(module, "count_characters", lambda _: characters)
        expected = VanillaTransformerTokenizer.train(lines, **options)
    assert found == expected.backend_tokenizer.to_str()


def test_characters_are_counted_with_a_blank_before_each_part_in_the_order_of_the_text():
    counts = count_characters(Counter({"ba": 2, "c b": 3}))

    assert list(counts.items()) == [(" ", 8), ("b", 5), ("a", 2), ("c", 3)]


def test_unused_character_is_none_of_the_text():
    assert unused_character([" ", "\0", "\x01", "\x03"]) == "\x02"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word"])
def test_text_is_read_once_and_may_be_an_iterator(kind):
    lines = ["a rose is a rose", "a dog"] * 3

    of_iterator = VanillaTransformerTokenizer.train(iter(lines), vocab_size=290, kind=kind)

    of_list = VanillaTransformerTokenizer.train(lines, vocab_size=290, kind=kind)
    assert of_iterator.backend_tokenizer.to_str() == of_list.backend_tokenizer.to_str()
    assert of_iterator("a rose")["input_ids"][0] > 3


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_empty_lines_are_refused_with_their_number(kind):
    with pytest.raises(ValueError, match="got 3 lines, all empty"):
        VanillaTransformerTokenizer.train(iter(["", "", ""]), vocab_size=290, kind=kind)
