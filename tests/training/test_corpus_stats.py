"""Facts of pairs, counted by hand."""

import pytest
from vanilla_transformer_tools.training.facts import read_facts

from vanilla_transformer_tools.training import facts as module


def facts_of(*pairs):
    return read_facts(pairs, minutes=1, speed=2, device="cpu")


def test_facts_are_counted():
    facts = facts_of(("ab cd", "xy"), ("ab", "ab cd efgh ij"))

    assert (facts.pairs, facts.distinct_words) == (2, 5)
    assert (facts.source_words, facts.words) == (1.5, 4.0)
    assert (facts.source_characters, facts.characters) == (3.5, 11.0)
    assert facts.occurrences == 8 / 5
    assert facts.long_characters == 12


def test_alphabet_is_counted_whole_and_in_parts():
    facts = facts_of(("한 é", "ee\u0301"))

    assert (facts.alphabet, facts.alphabet_apart) == (5, 6)
    assert facts.growth_apart == 9 / 6


def test_copied_words_are_long_ones_of_the_same_pair():
    facts = facts_of(("int openFile ;", "int openFile ;"), ("none", "other openFile"))

    assert facts.copied_words == pytest.approx(1 / 3)


def test_shared_letters_are_those_of_the_target():
    assert facts_of(("aac 1", "αβ a")).shared_letters == pytest.approx(1 / 3)


def test_stops_after_a_blank_are_tokenised():
    assert facts_of(("a , b .", "a b .")).spaced_stops == 1.0
    assert facts_of(("a, b .", "a b.")).spaced_stops == pytest.approx(1 / 3)
    assert facts_of(("a", "b")).spaced_stops == 0.0


def test_pairs_beyond_those_examined_are_counted(monkeypatch):
    monkeypatch.setattr(module, "EXAMINED_PAIRS", 1)

    facts = facts_of(("a b", "c"), ("d", "e"), ("f", "g"))

    assert (facts.pairs, facts.distinct_words) == (3, 3)


def test_third_column_is_no_text():
    assert facts_of(("a", "b", "de")).distinct_words == 2


@pytest.mark.parametrize(
    ("seconds", "speed"),
    [
        ([0.5], (200, 0.0)),
        # A second for each 900 tokens more; the first hundred take 0.5 s all the same.
        ([0.5, 1.5], (900, 0.5 - 100 / 900)),
        # No difference that the clock shows: a tenth of 0.5 s.
        ([0.5, 0.4], (900 / 0.04, 0.5 - 0.04 / 9)),
        ([0.1, 1.1], (900, 0.0)),
    ],
)
def test_speed_is_a_line_through_two_batches(seconds, speed):
    found = module._line_through([100, 1000][: len(seconds)], seconds)

    assert found == pytest.approx(speed)
