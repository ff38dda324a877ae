"""BPE-dropout: the algorithm of the paper, drawn from seed and epoch, the text unharmed."""

import random
from collections import Counter

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.text import bpe_dropout
from vanilla_transformer_tools.text.bpe_dropout import SegmentedLines, SegmentedPairs, segment
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

LINES = [
    "der Hund rennt durch den Garten, der Hund bellt",
    "die Hunde rennen durch die Gärten: 12 Hunde!",
    "",
    "ein alter Mann 你好 schläft </s> im  Garten",
] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(LINES[:3], vocab_size=320)


def build(tokenizer, rate=0.3, seed="7"):
    return SegmentedLines(tokenizer, LINES, rate=rate, seed=seed)


def ids_of(lines, epoch):
    lines.draw(epoch)
    return [lines[index] for index in range(len(LINES))]


def test_lines_are_cut_as_by_the_tokenizer_when_nothing_is_left_out(tokenizer):
    assert ids_of(build(tokenizer, rate=0.0), 0) == tokenizer(LINES)["input_ids"]


def test_longest_word_takes_time_in_proportion_and_survives(tokenizer, monkeypatch):
    lengths = []

    def record(symbols, *others):
        lengths.append(len(symbols))
        segment(symbols, *others)

    monkeypatch.setattr(bpe_dropout, "segment", record)
    text = "gartenhund" * 150
    lines = SegmentedLines(tokenizer, [text], rate=0.3, seed="7")

    lines.draw(0)

    assert tokenizer.decode(lines[0], skip_special_tokens=True) == text
    # Of the word, which begins with a blank, and of `</s>`.
    assert lengths == [*[bpe_dropout.LONGEST_WORD] * 15, 1, 1]


def test_segmentations_follow_from_seed_and_epoch(tokenizer):
    lines = build(tokenizer)
    first = ids_of(lines, 3)
    ids_of(lines, 4)

    assert ids_of(lines, 3) == first == ids_of(build(tokenizer), 3)
    assert ids_of(lines, 4) != first
    assert ids_of(build(tokenizer, seed="8"), 3) != first


def test_merges_are_left_out_at_their_rate():
    # One possible merge at a time: "abc" stays in three pieces when the first merge is dropped, in
    # two when the second one is.
    merges = {(1, 2): (0, 4), (4, 3): (1, 5)}
    draw = random.Random(0).random
    outcomes = Counter()
    for _ in range(20_000):
        pieces = [1, 2, 3]
        segment(pieces, merges, 0.3, draw)
        outcomes[tuple(pieces)] += 1

    shares = {pieces: count / 20_000 for pieces, count in outcomes.items()}
    # Five standard deviations.
    assert shares == pytest.approx({(1, 2, 3): 0.3, (4, 3): 0.7 * 0.3, (5,): 0.49}, abs=0.018)


def test_merge_of_lowest_rank_comes_first_and_the_leftmost_of_equals():
    merges = {(1, 1): (1, 2), (1, 3): (0, 4)}
    pieces = [1, 1, 1, 3]
    equals = [1, 1, 1]

    segment(equals, merges, 0.0, lambda: 0.5)
    segment(pieces, merges, 0.0, lambda: 0.5)

    assert pieces == [2, 4]
    assert equals == [2, 1]


def test_pairs_are_truncated_before_eos_and_counted(tokenizer):
    texts = {"source": LINES, "target": LINES[::-1]}
    pairs = SegmentedPairs(TokenizerPair.joint(tokenizer), texts, rate=0.3, seed=1, max_length=12)
    lengths = pairs.draw(1)

    assert len(pairs) == len(LINES)
    for index, (source, target) in enumerate(lengths.tolist()):
        pair = pairs[index]
        assert (len(pair["input_ids"]), len(pair["labels"])) == (source, target)
        assert max(source, target) <= 12
        assert pair["input_ids"][-1] == pair["labels"][-1] == tokenizer.eos_token_id
    # All but pairs of an empty line and an empty line; there is one in four, facing others.
    assert pairs.truncated_pairs == int((lengths == 12).any(axis=1).sum()) > 0


@pytest.mark.parametrize(("kind", "rate"), [("unigram", 0.1), ("bpe", 1.0), ("bpe", -0.1)])
def test_other_vocabularies_and_rates_are_refused(kind, rate):
    tokenizer = VanillaTransformerTokenizer.train(LINES, vocab_size=300, kind=kind)
    name = {"bpe": "BPE", "unigram": "Unigram"}[kind]

    with pytest.raises(ValueError, match=f"got {name} and {rate}"):
        SegmentedLines(tokenizer, LINES, rate=rate, seed="1")
