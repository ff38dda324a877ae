"""Counts of pairs, counted by hand."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from vanilla_transformer_tools.training import corpus_stats as module


@pytest.fixture
def stats_of(monkeypatch):
    monkeypatch.setattr(module, "training_speed", lambda arguments: module.Speed(2))
    arguments = SimpleNamespace(device=torch.device("cpu"), gradient_accumulation_steps=1)

    def measure(*pairs):
        columns = zip(("source", "target"), zip(*pairs, strict=True), strict=True)
        dataset = Dataset.from_dict({name: list(values) for name, values in columns})
        return module.measure(1, arguments, dataset)

    return measure


def test_stats_are_counted(stats_of):
    stats = stats_of(("ab cd", "xy"), ("ab", "ab cd efgh ij"))

    assert (stats.pairs, stats.distinct_words) == (2, 5)
    assert (stats.source_words, stats.words) == (1.5, 4.0)
    assert (stats.source_characters, stats.characters) == (3.5, 11.0)
    assert stats.occurrences == 8 / 5
    assert stats.long_characters == 12


def test_alphabet_is_counted_whole_and_in_parts(stats_of):
    stats = stats_of(("한 é", "ee\u0301"))

    assert (stats.alphabet, stats.alphabet_apart) == (5, 6)
    assert stats.growth_apart == 9 / 6


def test_copied_words_are_long_ones_of_the_same_pair(stats_of):
    stats = stats_of(("int openFile ;", "int openFile ;"), ("none", "other openFile"))

    assert stats.copied_words == pytest.approx(1 / 3)


def test_pairs_beyond_those_examined_are_counted(stats_of, monkeypatch):
    monkeypatch.setattr(module, "EXAMINED_PAIRS", 1)

    stats = stats_of(("a b", "c"), ("d", "e"), ("f", "g"))

    assert (stats.pairs, stats.distinct_words) == (3, 3)


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
