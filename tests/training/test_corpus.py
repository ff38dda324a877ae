"""Samples from all over a corpus, and what a plan learns from the text."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from vanilla_transformer_tools.evaluation import bleu_tokenizers
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import Corpus, FilteredPairs
from vanilla_transformer_tools.training.corpus import look_at, sample, validation_sample

TOKYO = "\u6771\u4eac"


def corpus_of(sources, validation=None):
    pairs = Dataset.from_dict({"source": sources, "target": sources})
    verdicts = np.zeros(len(sources), np.uint8)
    return Corpus(FilteredPairs(pairs, (), verdicts), validation, lambda: iter(()))


def test_sample_has_a_row_of_each_part_and_is_always_the_same():
    rows = sample(1000, 10)

    assert [row // 100 for row in rows] == list(range(10))
    assert rows == sample(1000, 10)
    # No step of a fixed length, which could meet one of two languages that alternate.
    assert len(set(np.diff(rows))) > 5
    assert sample(3, 10) == [0, 1, 2]


@pytest.mark.parametrize("tags", [["de"] * 80 + ["fr"] * 20, ["de", "de", "de", "de", "fr"] * 20])
def test_each_file_and_language_has_its_share_of_the_scored_pairs(tags):
    numbers = list(map(str, range(100)))
    pairs = Dataset.from_dict({"source": numbers, "target": numbers, "tag": tags})

    scored = validation_sample(pairs, 10)

    assert Counter(scored["tag"]) == {"de": 8, "fr": 2}
    assert scored["source"][:] == sorted(scored["source"], key=int)
    assert len({int(source) // 10 for source in scored["source"]}) > 5
    assert validation_sample(pairs, None) is validation_sample(pairs, 100) is pairs


def test_text_is_looked_at():
    sources = ["Ja. Nein."] * 3 + ["42", "-"] + ["Ja."] * 95

    facts = look_at(corpus_of(sources), TrainSettings(), {})

    assert (facts.pairs, facts.inner_ends, facts.without_letter) == (100, 0.03, 0.02)
    assert facts.record == {
        "lines_of_several_sentences": 0.03,
        "sources_without_letters": 0.02,
        "frequent_source_words": ["Ja.", "Nein.", "42", "-"],
    }
    assert look_at(corpus_of(sources), TrainSettings(streaming=True), {}).pairs is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "zh"),
        ({"language": ["de", "ja"]}, "char"),
        ({"target_language": "ja"}, "char"),
        ({"validation": ["v.de", "v.ja"]}, "char"),
        ({"bleu_tokenize": "intl"}, "intl"),
        ({"pretokenized": True}, "none"),
    ],
)
def test_bleu_tokenizer_is_that_of_the_target_language(changes, expected, monkeypatch):
    monkeypatch.setattr(bleu_tokenizers, "_is_usable", lambda name: name in ("char", "zh", "13a"))
    validation = Dataset.from_dict({"source": ["a"], "target": [TOKYO]})
    settings = TrainSettings(**{"validation": ["v.tsv"]} | changes)

    facts = look_at(corpus_of(["a"], validation), settings, {})

    assert facts.bleu.name == facts.record["bleu_tokenizer"]["name"] == expected
    kept = look_at(
        corpus_of(["a"], validation), settings, {"bleu_tokenizer": {"name": "flores200"}}
    )
    assert kept.bleu.name == "flores200"
