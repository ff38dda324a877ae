"""What the trainer reads: pairs that are stored, drawn anew, or streamed, and runs on a stream."""

from collections import Counter
from dataclasses import replace
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text import training_data
from vanilla_transformer_tools.text.filters import Corpus, FilteredPairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import TokenBatchStream, build_data

from ..support.training_runs import checkpoints_of, read_json, read_log, run_training

# Sources of letters, targets of digits; in the last pair both sides are too long.
PAIRS = [("ab" * (1 + n % 3), "12" * (1 + n % 4)) for n in range(39)] + [("b" * 30, "2" * 30)]
SETTINGS = TrainSettings(max_length=20, max_tokens_per_batch=80, shuffle_buffer=16)


@pytest.fixture(scope="module")
def tokenizers():
    return TokenizerPair.joint(VanillaTransformerTokenizer.train(["ab 12"] * 9, vocab_size=270))


def build(tokenizers, settings=SETTINGS, pairs=PAIRS, **changes):
    columns = zip(("source", "target", "tag"), zip(*pairs, strict=True), strict=False)
    dataset = Dataset.from_dict(dict(columns))
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


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_processes_share_each_batch(tokenizers, rate):
    settings = TrainSettings(max_length=20, max_tokens_per_batch=160, bpe_dropout=rate)
    shares = [build(tokenizers, settings, world_size=2, process_index=index) for index in range(2)]

    rows = [list(share.batching["batch_sampler"]) for share in shares]

    assert sorted(np.concatenate([*rows[0], *rows[1]]).tolist()) == list(range(40))
    assert len(rows[0]) == len(rows[1]) == shares[0].batches


# Streams

MAX_LENGTH = 20


@pytest.fixture(scope="module")
def tokenizer() -> VanillaTransformerTokenizer:
    """One token for each character."""
    return VanillaTransformerTokenizer.train(["0123456789x"], vocab_size=20, kind="char")


def number_pairs(size: int) -> list[tuple[str, str]]:
    """Sources are the number of the pair and filling; both sides are skewed in length."""
    rng = np.random.default_rng(7)
    fill = np.minimum(14, rng.gamma(2, 2, (size, 2))).astype(int).tolist()
    return [(f"{number}{'x' * s}", f"{'x' * t}") for number, (s, t) in enumerate(fill)]


@pytest.fixture
def stream_of(tokenizer):
    """Makes a stream of 600 pairs; a pass over them fills three buffers."""

    def make_stream(pairs=None, **changes):
        read = pairs if callable(pairs) else (lambda: iter(pairs or number_pairs(600)))
        given = {"max_length": MAX_LENGTH, "max_tokens": 300, "buffer_size": 200, "seed": 0}
        return TokenBatchStream(read, TokenizerPair.joint(tokenizer), **given | changes)

    return make_stream


@pytest.fixture
def numbers_in(tokenizer):
    """Tells the numbers of the pairs in a batch of a stream."""

    def read(batch):
        texts = tokenizer.batch_decode([row["input_ids"] for row in batch], True)
        return [int(text.rstrip("x")) for text in texts]

    return read


def cost(rows):
    """Tokens of a batch, padding counted."""
    longest = (max(len(row[name]) for row in rows) for name in ("input_ids", "labels"))
    return len(rows) * sum(longest)


# The batches


def test_each_buffer_holds_the_next_pairs_once_and_mixes_them(stream_of, numbers_in):
    numbers = list(islice(chain.from_iterable(map(numbers_in, stream_of())), 600))

    for first in (0, 200, 400):
        assert sorted(numbers[first : first + 200]) == list(range(first, first + 200))
    assert abs(np.corrcoef(numbers[:200], range(200))[0, 1]) < 0.3


def test_batches_are_reproduced_by_the_seed(stream_of, numbers_in):
    stream = stream_of(seed=3)

    # More than a pass.
    first, again, same, other = (
        list(islice(map(numbers_in, each), 4 * stream.batches_per_buffer))
        for each in (stream, stream, stream_of(seed=3), stream_of(seed=4))
    )

    assert first == again == same != other


# Three processes do not divide 601.
@pytest.mark.parametrize(("num_processes", "passes"), [(1, 1), (3, 1), (3, 3)])
def test_processes_share_pairs_budget_and_buffer(stream_of, numbers_in, num_processes, passes):
    read = []
    for index in range(num_processes):
        sharing = {"num_processes": num_processes, "process_index": index}
        stream = stream_of(number_pairs(601), buffer_size=passes * 601, **sharing)
        batches = list(islice(stream, stream.batches_per_buffer))

        read += chain(*map(numbers_in, batches))
        assert stream.buffer_size == passes * 601 // num_processes
        costs = [cost(batch) for batch in batches]
        assert max(costs) <= 300 // num_processes < 1.5 * np.mean(costs)

    assert set(Counter(read).values()) == {passes}


def test_only_two_buffers_are_in_memory_and_no_batch_waits_for_a_whole_one(stream_of):
    taken = []

    def read():
        for pair in number_pairs(5000):
            taken.append(pair)
            yield pair

    stream = stream_of(read)
    taken.clear()
    used, ahead, marks = 0, [], []
    for batch in islice(stream, 60):
        ahead.append(len(taken) - used)
        marks.append(len(taken))
        used += len(batch)

    assert max(ahead) <= 400
    assert np.diff(marks).max() < 3 * np.diff(marks).mean()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_workers_yield_the_batches_of_the_main_process(stream_of, tokenizer):
    def inputs_of(num_workers):
        collate = DataCollatorForSeq2Seq(tokenizer)
        loader = DataLoader(
            stream_of(), batch_size=None, collate_fn=collate, num_workers=num_workers
        )
        return [batch["input_ids"].tolist() for batch in islice(loader, 45)]

    assert inputs_of(2) == inputs_of(0)


def test_long_sides_are_truncated_and_counted_in_the_first_buffer(
    stream_of, tokenizer, monkeypatch
):
    monkeypatch.setattr(training_data, "_PAIRS_AT_A_TIME", 7)
    pairs = [("x" * (3 + n), "x" * (30 - n)) for n in range(20)]

    stream = stream_of(pairs, buffer_size=20, max_length=17)

    # A side is over 16 letters and `</s>` up to pair 13 in the target, from 14 on in the source.
    assert stream.truncated_pairs == sum(max(len(s), len(t)) > 16 for s, t in pairs)
    rows = list(chain(*islice(stream, stream.batches_per_buffer)))
    assert max(len(ids) for row in rows for ids in row.values()) == 17
    assert all(ids[-1] == tokenizer.eos_token_id for row in rows for ids in row.values())


# What a stream refuses


@pytest.mark.parametrize(("num_processes", "enough"), [(1, 40), (3, 120)])
def test_budget_that_unlucky_buffers_would_not_fit_is_refused(stream_of, num_processes, enough):
    # The worst: a buffer of nothing but longest pairs.
    pairs = [("x" * 19, "x" * 19)] * 50
    options = {"num_processes": num_processes, "buffer_size": 50}

    with pytest.raises(ValueError, match=rf"at least {enough}, .*, got {enough - 1}"):
        stream_of(pairs, max_tokens=enough - 1, **options)
    assert len(list(islice(stream_of(pairs, max_tokens=enough, **options), 99))) == 99


# Training


def test_run_saves_and_scores_a_stream_by_updates(corpus, tmp_path, capsys):
    settings = {"streaming": True, "shuffle_buffer": 100, "max_length": 60}
    run_training(corpus, tmp_path, settings, max_steps=3, save_steps=2, eval_steps=2)

    assert [one["step"] for one in read_log(tmp_path) if "eval_bleu" in one] == [2, 3]
    assert checkpoints_of(tmp_path) == [2, 3]
    record = read_json(tmp_path / "run.json")
    assert (record["updates"], record["pairs"], record["epochs"]) == (3, None, None)
    assert "A stream of pairs, 3 updates" in (tmp_path / "README.md").read_text()
    plan = capsys.readouterr().out
    assert "100 a buffer, 0 of them cut" in plan
