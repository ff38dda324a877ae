"""What the trainer reads: the same attributes of pairs stored, drawn anew, or streamed."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from vanilla_transformer.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import Corpus, FilteredPairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import build_data

# Sources of letters, targets of digits; in the last pair both sides are too long.
PAIRS = [("ab" * (1 + n % 3), "12" * (1 + n % 4)) for n in range(39)] + [("b" * 30, "2" * 30)]
SETTINGS = TrainSettings(max_length=20, max_tokens_per_batch=80, shuffle_buffer=16)


@pytest.fixture(scope="module")
def tokenizers():
    return TokenizerPair.joint(VanillaTransformerTokenizer.train(["ab 12"] * 9, vocab_size=270))


def build(tokenizers, settings=SETTINGS, pairs=PAIRS, **changes):
    source, target = zip(*pairs, strict=True)
    dataset = Dataset.from_dict({"source": source, "target": target})
    filtered = FilteredPairs(dataset, (), np.zeros(len(pairs), np.uint8))
    given = {"seed": 0, "data_seed": None, "world_size": 1, "process_index": 0}
    arguments = SimpleNamespace(**given | changes)
    return build_data(Corpus(filtered, {}, lambda: iter(pairs)), tokenizers, settings, arguments)


@pytest.mark.parametrize(("data_seed", "expected"), [(None, 7), (5, 5)])
def test_order_has_a_seed_of_its_own_if_one_is_given(tokenizers, data_seed, expected):
    data = build(tokenizers, seed=7, data_seed=data_seed)

    assert data.batching["batch_sampler"].seed == expected


def batches_of(data, epoch=0):
    data.set_epoch(epoch)
    return list(DataLoader(data.dataset, collate_fn=list, **data.batching))


def texts_of(batches, tokenizers):
    return sorted(
        (
            tokenizers.source.decode(row["input_ids"], True),
            tokenizers.target.decode(row["labels"], True),
        )
        for batch in batches
        for row in batch
    )


def test_stored_data_are_described_by_an_epoch(tokenizers):
    data = build(tokenizers)

    batches = batches_of(data)
    sides = [
        [[len(row[name]) for row in batch] for name in ("input_ids", "labels")] for batch in batches
    ]
    tokens = sum(sum(map(sum, both)) for both in sides)
    padding = 1 - tokens / sum(len(both[0]) * sum(map(max, both)) for both in sides)
    assert data.describe_pairs() == "40, 1 of them cut to the maximal length"
    assert data.describe_batches() == f"{len(batches)} an epoch, {padding:.1%}".replace(
        "%", " % padding"
    )
    assert data.record(2.504) == {"pairs": 40, "truncated_pairs": 1, "epochs": 2.5}


def test_drawn_data_have_the_ids_and_lengths_of_each_epoch(tokenizers):
    settings = TrainSettings(max_length=70, max_tokens_per_batch=140, bpe_dropout=0.5)
    data = build(tokenizers, settings)

    first, second = (batches_of(data, epoch) for epoch in (0, 1))

    assert texts_of(first, tokenizers) == texts_of(second, tokenizers) == sorted(PAIRS)
    ids = [
        sorted(row["labels"] for batch in batches for row in batch) for batches in (first, second)
    ]
    assert ids[0] != ids[1]
    for batch in second:
        longest = [max(len(row[name]) for row in batch) for name in ("input_ids", "labels")]
        assert len(batch) * sum(longest) <= 140
    assert data.record(1.0)["pairs"] == 40


def test_stream_is_described_by_its_first_buffer_and_records_nothing(tokenizers):
    data = build(tokenizers, replace(SETTINGS, streaming=True))

    loader = DataLoader(data.dataset, collate_fn=list, **data.batching)
    assert texts_of(islice(loader, data.batches), tokenizers) == sorted(PAIRS[:16])
    assert data.describe_pairs() == "16 a buffer, 0 of them cut to the maximal length"
    assert data.describe_batches().startswith(f"{data.batches} a buffer, ")
    assert data.record(2.5) == {"pairs": None, "truncated_pairs": None, "epochs": None}
    data.set_epoch(3)


def test_numbers_of_a_stream_are_those_of_all_processes(tokenizers):
    # Every second pair is a long one, in the share of the first process too.
    pairs = [pair for pair in [("a" * 30, "1"), ("b", "22")] for _ in range(2)]
    alone, shared = (
        build(tokenizers, replace(SETTINGS, streaming=True), pairs, world_size=processes)
        for processes in (1, 2)
    )

    assert shared.pairs == alone.pairs == 16
    assert shared.tokens == alone.tokens
    assert shared.truncated_pairs == alone.truncated_pairs == 8


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_processes_share_each_batch(tokenizers, rate):
    settings = TrainSettings(max_length=20, max_tokens_per_batch=160, bpe_dropout=rate)
    shares = [build(tokenizers, settings, world_size=2, process_index=index) for index in range(2)]

    rows = [list(share.batching["batch_sampler"]) for share in shares]

    assert sorted(np.concatenate([*rows[0], *rows[1]]).tolist()) == list(range(40))
    assert len(rows[0]) == len(rows[1]) == shares[0].batches
