"""Training text in capitals and in title case: which pairs, when, and what stays as it is."""

from dataclasses import replace
from itertools import chain, islice

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text import token_ids
from vanilla_transformer_tools.text.casing import Casing
from vanilla_transformer_tools.text.token_ids import learn_tokenizer
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from .test_training_data import build as build_data

SETTINGS = TrainSettings(
    all_caps_every=3, title_case_every=4, max_length=40, max_tokens_per_batch=160
)
PAIRS = [
    (f"der <ph>hund {number}", f"Straße {number}", ("de", "en")[number % 3 == 0])
    for number in range(1000, 1024)
]
SYMBOLS = ["<ph>", "<ph>x"]


def casing_of(symbols=(), **changes):
    return Casing.of_run(replace(SETTINGS, **changes), symbols)


def build(streaming=False, pairs=PAIRS, **changes):
    text = [" ".join(pair[:2]) for pair in pairs]
    tokenizer = VanillaTransformerTokenizer.train(
        [*text, *map(str.upper, text)], kind="char", symbols=["<ph>"], target_languages=["de", "en"]
    )
    settings = replace(SETTINGS, streaming=streaming, shuffle_buffer=24)
    return build_data(TokenizerPair.joint(tokenizer), settings, pairs, **changes), tokenizer


def texts_of(data, tokenizer):
    """Texts of the sources and targets of an epoch, or of the first batches of a stream."""
    loader = DataLoader(data.dataset, collate_fn=list, **data.batching)
    rows = list(chain.from_iterable(islice(loader, data.batches)))
    for row in rows:
        number = int(tokenizer.decode(row["labels"], skip_special_tokens=True).split()[-1])
        tag = "<2en>" if number % 3 == 0 else "<2de>"
        assert row["input_ids"][0] == tokenizer.convert_tokens_to_ids(tag)
    sides = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    texts = (tokenizer.batch_decode(side, skip_special_tokens=True) for side in sides)
    return sorted(zip(*texts, strict=True), key=lambda pair: pair[0].split()[-1])


def test_text_is_changed_but_for_symbols_and_tags():
    casing = casing_of(SYMBOLS)

    in_capitals, as_it_is, in_title_case = (
        casing.changed_pair(("it's <ph>xa \u00fcber 2 NATO", "stra\u00dfe <ph>", "de"), place)
        for place in (6, 1, 7)
    )

    assert in_capitals == ("IT'S <ph>xA \u00dcBER 2 NATO", "STRASSE <ph>", "de")
    assert as_it_is == ("it's <ph>xa \u00fcber 2 NATO", "stra\u00dfe <ph>", "de")
    assert in_title_case == ("It's <ph>xA \u00dcber 2 NATO", "stra\u00dfe <ph>", "de")
    assert casing_of(all_caps_every=None, title_case_every=None) is None


@pytest.mark.parametrize("changes", [{}, {"all_caps_every": None}, {"title_case_every": None}])
def test_each_pair_has_its_turn(changes):
    casing = casing_of(**changes)
    pair = ("der hund", "the dog")

    changed = [[casing.changed_pair(pair, row + epoch) for row in range(30)] for epoch in range(12)]

    for epoch, pairs in enumerate(changed):
        rows = [row for row, one in enumerate(pairs) if one != pair]
        assert rows == casing.rows(30, epoch) != casing.rows(30, epoch + 1)
    for row in range(30):
        assert len({pairs[row] for pairs in changed}) == 3 - len(changes)
    assert casing.rows(0, 5) == []


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_pairs_of_an_epoch_are_trained_on_as_they_are_changed(epoch):
    data, tokenizer = build()
    casing = casing_of(["<ph>"])

    data.set_epoch(7)
    data.set_epoch(epoch)

    expected = [casing.changed_pair(pair, row + epoch)[:2] for row, pair in enumerate(PAIRS)]
    assert texts_of(data, tokenizer) == expected
    for batch in DataLoader(data.dataset, collate_fn=list, **data.batching):
        longest = [max(len(row[name]) for row in batch) for name in ("input_ids", "labels")]
        assert len(batch) * sum(longest) <= 160
    assert data.describe_pairs() == "24, 0 of them cut to the maximal length"


def test_pairs_of_a_stream_are_changed_by_their_places_in_each_process():
    casing = casing_of(["<ph>"])
    expected = [casing.changed_pair(pair, row)[:2] for row, pair in enumerate(PAIRS)]

    alone, *shares = (
        texts_of(*build(streaming=True, **process))
        for process in ({}, {"world_size": 2}, {"world_size": 2, "process_index": 1})
    )

    assert alone == expected
    assert sorted(pair for share in shares for pair in share) == sorted(expected)


def test_vocabulary_is_learned_from_the_text_of_the_first_epoch(monkeypatch):
    monkeypatch.setattr(token_ids, "ROWS_AT_A_TIME", 3)
    pairs = Dataset.from_dict({"source": ["ab"] * 8, "target": ["cd"] * 8})

    learned = [
        learn_tokenizer(pairs, ["source", "target"], casing, kind="word", vocab_size=99)
        for casing in (casing_of(), None)
    ]

    words = [set(one.get_vocab()) & {"ab", "AB", "Ab", "cd", "CD", "Cd"} for one in learned]
    assert words == [{"ab", "AB", "Ab", "cd", "CD"}, {"ab", "cd"}]
