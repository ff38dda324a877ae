"""Token ids of pairs: those of the tokenizer, in whatever way they are computed."""

import datasets
import numpy as np
import pytest
from datasets import Dataset

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.text import token_ids
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.token_ids import (
    PairEncoder,
    encode_pairs,
    has_independent_parts,
    pair_lengths,
    tokenize_pairs,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..support.odd_text import odd_lines


def pairs_of(rows):
    source, target = zip(*rows, strict=True)
    return Dataset.from_dict({"source": source, "target": target})


@pytest.mark.parametrize(
    ("options", "by_words"),
    [
        ({}, True),
        ({"pretokenized": True}, True),
        ({"kind": "unigram"}, True),
        ({"target_languages": ["de"]}, True),
        ({"unicode_form": "NFKD"}, False),
        ({"kind": "char"}, False),
        ({"kind": "word"}, False),
    ],
)
def test_ids_are_those_of_the_tokenizer_for_whole_lines(options, by_words, monkeypatch):
    lines = odd_lines(400)
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=400, **options)
    tagged = {"tag": ["de"] * 100} if "target_languages" in options else {}
    # Fewer than there are, so that some are forgotten.
    monkeypatch.setattr(token_ids, "_MOST_WORDS", 300)

    encoder = PairEncoder(TokenizerPair.joint(tokenizer), 1000)
    found = []
    # Lines of the first part occur again in the last one.
    for first in (0, 100, 200, 300, 0):
        part = lines[first : first + 100]
        encoded = encoder({"source": part, "target": part[::-1], **tagged})
        columns = {name: column.to_pylist() for name, column in encoded.items()}
        expected = tokenizer([without_blank_ends(line) for line in part])["input_ids"]
        assert [ids[len(tagged) :] for ids in columns["input_ids"]] == expected
        assert columns["labels"] == expected[::-1]
        found.append(columns)

    assert found[0] == found[-1]
    assert has_independent_parts(tokenizer) == by_words


def test_words_that_a_text_must_not_spell_are_plain_text_from_the_first_batch():
    lines = ["a </s> b", "<pad> a"]
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=270)

    ids = encode_pairs({"source": lines, "target": lines}, TokenizerPair.joint(tokenizer), 50)

    specials = {tokenizer.pad_token_id, tokenizer.eos_token_id}
    assert not specials & {token for side in ids["labels"] for token in side[:-1]}


def test_words_depend_on_each_other_when_a_token_may_span_several():
    tokenizer = VanillaTransformerTokenizer.train(["New York"] * 3, vocab_size=270)
    assert has_independent_parts(tokenizer)

    tokenizer.add_tokens(["New York"])

    pairs = {"source": ["New York"], "target": ["New York"]}
    ids = encode_pairs(pairs, TokenizerPair.joint(tokenizer), 50)
    assert ids["labels"] == tokenizer(["New York"])["input_ids"]
    assert not has_independent_parts(tokenizer)


def test_words_are_independent_beside_characters_that_nobody_sees():
    lines = ["a \u200b b", "\ufeffa b\u200b", "a\u200bb c", "a \ufeff\t b", "\u200b", "a\t\ufeff b"]
    tokenizer = VanillaTransformerTokenizer.train(["a b\tc"], vocab_size=270)
    assert has_independent_parts(tokenizer)

    ids = encode_pairs({"source": lines, "target": lines}, TokenizerPair.joint(tokenizer), 50)

    assert ids["labels"] == tokenizer(lines)["input_ids"]


def test_memory_of_words_is_limited(monkeypatch):
    monkeypatch.setattr(token_ids, "_MOST_WORDS", 30)
    tokenizer = VanillaTransformerTokenizer.train(["12345 67890"] * 3, vocab_size=280)
    encoder = PairEncoder(TokenizerPair.joint(tokenizer), 50)

    for first in range(0, 100, 20):
        lines = [str(number) for number in range(first, first + 20)]
        encoder({"source": lines, "target": lines})

    assert 20 <= len(encoder._source._ids) <= 30


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(["aaaabc"], vocab_size=20, kind="char")


@pytest.fixture
def abc_pairs():
    return pairs_of([("abc", "aa"), ("", "bcab"), ("abca", "abcb"), ("bbbbbb", "a")])


def test_tokenizing_truncates_before_eos_and_counts_pairs(abc_pairs, tokenizer):
    before = tokenizer.backend_tokenizer.to_str()

    tokenized, truncated = tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=4)

    # One pair is too long on its target, one on both sides, one on its source.
    assert truncated == 3
    sources, targets = tokenized["input_ids"][:], tokenized["labels"][:]
    assert tokenizer.batch_decode(sources) == ["abc</s>", "</s>", "abc</s>", "bbb</s>"]
    assert tokenizer.batch_decode(targets) == ["aa</s>", "bca</s>", "abc</s>", "a</s>"]
    # The tokenizer would go on truncating if it had been told to.
    assert tokenizer.backend_tokenizer.to_str() == before


def test_tokenizing_takes_the_tokenizer_of_each_side(abc_pairs, tokenizer):
    other = VanillaTransformerTokenizer.train(["cba"], vocab_size=9, kind="char")
    assert other("abc")["input_ids"] != tokenizer("abc")["input_ids"]

    tokenized, truncated = tokenize_pairs(abc_pairs, TokenizerPair(tokenizer, other), max_length=7)

    assert truncated == 0
    assert tokenized.column_names == ["source", "target", "input_ids", "labels"]
    assert tokenizer.batch_decode(tokenized["input_ids"][:2]) == ["abc</s>", "</s>"]
    assert other.batch_decode(tokenized["labels"][:2]) == ["aa</s>", "bcab</s>"]


def test_each_occurrence_of_a_word_is_drawn_under_dropout():
    tokenizer = VanillaTransformerTokenizer.train(["abc bcab abca " * 9], vocab_size=280)
    tokenizer.backend_tokenizer.model.dropout = 0.5
    lines = ["bcab"] * 30

    ids = encode_pairs({"source": lines, "target": lines}, TokenizerPair.joint(tokenizer), 20)

    assert len(set(map(tuple, ids["labels"]))) > 1


def test_tokenizing_refuses_a_limit_without_room_for_text(abc_pairs, tokenizer):
    with pytest.raises(ValueError, match=r"at least 2.* got 1\."):
        tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=1)


def test_tokenizing_prints_nothing_without_a_terminal(abc_pairs, tokenizer, capfd):
    tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=4)

    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_pair_lengths_count_tokens_in_the_order_of_the_dataset(abc_pairs, tokenizer):
    tokenized, _ = tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=10)

    lengths = pair_lengths(tokenized.select([3, 1, 0]))

    np.testing.assert_array_equal(lengths, [[7, 2], [1, 5], [4, 3]])
