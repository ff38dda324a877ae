import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from itertools import chain

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import skip_first_batches
from datasets import Dataset, DatasetDict
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from vanilla_transformer import data
from vanilla_transformer.data import (
    ParallelText,
    TokenBatchSampler,
    checksum,
    load_pairs,
    pair_lengths,
    tokenize_pairs,
)
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer

# Blanks at the ends, an empty side, and separators that end a line for others but not for us.
PAIRS = [
    (" Ein Hund\u2028rennt. ", "A dog runs.\r"),
    ("", "Nothing\x85said.\x0c"),
    ("Zwei  Männer \N{DOG FACE}", ""),
]
SOURCES, TARGETS = map(list, zip(*PAIRS, strict=True))
RECORDS = [{"source": source, "target": target} for source, target in PAIRS]
NESTED = [{"id": 7, "data": {"text": {"de": source, "en": target}}} for source, target in PAIRS]
DE_EN = {"source_column": "data.text.de", "target_column": "data.text.en"}


@pytest.fixture
def write(tmp_path):
    def write_file(name, lines, end="\n"):
        content = ("\n".join(lines) + end).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write_file


@pytest.fixture
def write_parquet(tmp_path):
    def write_file(records):
        path = tmp_path / "pairs.parquet"
        pq.write_table(pa.Table.from_pylist(records), path)
        return str(path)

    return write_file


def load(*paths, **options):
    return load_pairs(ParallelText(paths, **options))


def pairs_of(dataset):
    assert dataset.column_names == ["source", "target"]
    return [(row["source"], row["target"]) for row in dataset]


# Reading


@pytest.mark.parametrize("names", [("text.de", "text.en"), ("text.de.gz", "text.en")])
def test_two_files_give_every_pair_unaltered(write, names):
    paths = [write(name, lines) for name, lines in zip(names, (SOURCES, TARGETS), strict=True)]

    assert pairs_of(load(*paths)) == PAIRS


def test_two_files_keep_empty_lines_at_the_end(write):
    source, target = write("a", ["eins", "", ""]), write("b", ["one", "", ""])

    assert pairs_of(load(source, target)) == [("eins", "one"), ("", ""), ("", "")]


def test_two_files_fit_together_when_one_has_no_final_newline(write):
    source, target = write("a", ["eins", "zwei"]), write("b", ["one", "two"], end="")

    assert pairs_of(load(source, target)) == [("eins", "one"), ("zwei", "two")]


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.tsv.gz", "PAIRS.TSV"])
def test_tsv_gives_every_pair_unaltered(write, name):
    assert pairs_of(load(write(name, map("\t".join, PAIRS)))) == PAIRS


def test_tsv_takes_quotes_as_text(write):
    path = write("pairs.tsv", ['"Er sagt\t"yes"', "'a\tb\""])

    assert pairs_of(load(path)) == [('"Er sagt', '"yes"'), ("'a", 'b"')]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.jsonl.gz"])
def test_json_lines_give_every_pair_unaltered(write, name):
    assert pairs_of(load(write(name, map(json.dumps, RECORDS)))) == PAIRS


def test_json_lines_reach_into_nested_columns(write):
    assert pairs_of(load(write("pairs.jsonl", map(json.dumps, NESTED)), **DE_EN)) == PAIRS


@pytest.mark.parametrize(("records", "options"), [(RECORDS, {}), (NESTED, DE_EN)])
def test_parquet_gives_every_pair_unaltered(write_parquet, records, options):
    assert pairs_of(load(write_parquet(records), **options)) == PAIRS


@pytest.mark.parametrize(("records", "options"), [(RECORDS, {}), (NESTED, DE_EN)])
def test_saved_dataset_gives_every_pair_unaltered(tmp_path, records, options):
    Dataset.from_list(records).save_to_disk(tmp_path / "saved")

    assert pairs_of(load(str(tmp_path / "saved"), **options)) == PAIRS


def test_saved_dataset_gives_the_split_asked_for(tmp_path):
    other = Dataset.from_list([{"source": "ja", "target": "yes"}])
    splits = {"train": other, "validation": Dataset.from_list(RECORDS)}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")

    assert pairs_of(load(str(tmp_path / "saved"), split="validation")) == PAIRS


def test_named_dataset_is_loaded_with_its_configuration_and_split(monkeypatch):
    def load_dataset(name, config_name, *, split):
        assert (name, config_name, split) == ("team/corpus", "de-en", "test")
        # Reversed twice: its rows have another order than its table.
        return Dataset.from_list(NESTED[::-1]).select([2, 1, 0])

    monkeypatch.setattr(data, "load_dataset", load_dataset)

    dataset = load("team/corpus", config_name="de-en", split="test", **DE_EN)

    assert pairs_of(dataset) == PAIRS


def test_folder_of_data_files_is_loaded_as_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "train.parquet")

    assert pairs_of(load(str(folder))) == PAIRS


def test_pairs_beyond_one_chunk_keep_their_order(write_parquet, monkeypatch):
    monkeypatch.setattr(data, "_ROWS_AT_A_TIME", 2)

    assert pairs_of(load(write_parquet(RECORDS))) == PAIRS


def test_pairs_are_read_anew_when_a_file_has_changed(write):
    assert pairs_of(load(write("pairs.tsv", ["alt\told"]))) == [("alt", "old")]

    path = write("pairs.tsv", ["neu\tnew"])
    os.utime(path, (0, 0))

    assert pairs_of(load(path)) == [("neu", "new")]


def test_temporary_files_are_deleted_when_the_process_ends(write, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = """if True:
        import os, sys
        from vanilla_transformer.data import ParallelText, load_pairs
        dataset = load_pairs(ParallelText((sys.argv[1],)))
        dataset = dataset.map(lambda row: {"n": len(row["source"])}, load_from_cache_file=False)
        assert len(dataset.cache_files) == 1 and os.listdir(sys.argv[2])
    """
    path = write("pairs.tsv", ["eins\tone"])

    subprocess.run(
        [sys.executable, "-c", code, path, str(scratch)],
        env=os.environ | {"TMPDIR": str(scratch)},
        check=True,
    )

    assert list(scratch.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [tmp_path / "pairs.tsv", scratch]


# Errors of reading


def test_two_files_of_unequal_length_are_refused(write):
    short, long = write("a", ["1"] * 3), write("b", ["1"] * 1_205)

    with pytest.raises(ValueError, match=r"got 3 in '.*a' and 1,205 in '.*b': '.*b' .* 1,202\."):
        load(short, long)
    with pytest.raises(ValueError, match=r"got 1,205 in '.*b' and 3 in '.*a': '.*b' .* 1,202\."):
        load(long, short)


def test_two_files_that_each_hold_both_sides_are_refused(write):
    with pytest.raises(ValueError, match=r"such a file holds both sides: '.*b\.tsv\.gz'"):
        load(write("a", ["1"]), write("b.tsv.gz", ["1\t2"]))


@pytest.mark.parametrize("paths", [(), ("a", "b", "c")])
def test_parallel_text_refuses_other_than_one_or_two_paths(paths):
    with pytest.raises(ValueError, match=re.escape(f"got {paths}.")):
        ParallelText(paths)


@pytest.mark.parametrize(("line", "tabs"), [("no tab", 0), ("a\tb\tc", 2)])
def test_tsv_line_without_exactly_one_tab_is_refused(write, line, tabs):
    with pytest.raises(ValueError, match=rf"Line 2 of '.*x\.tsv' .* got {tabs} tabs"):
        load(write("x.tsv", ["a\tb", line]))


@pytest.mark.parametrize("line", ["{'source'", "", "[1, 2]", "17"])
def test_json_line_that_is_no_object_is_refused(write, line):
    expected = rf"Line 2 of '.*x\.jsonl' must be a JSON object, got {re.escape(repr(line))}"

    with pytest.raises(ValueError, match=expected):
        load(write("x.jsonl", ['{"source": "a", "target": "b"}', line]))


def test_unknown_column_is_refused_with_the_columns_of_json(write):
    path = write("x.jsonl", map(json.dumps, NESTED))

    with pytest.raises(ValueError, match=r"'target'.* id, data\.text\.de, data\.text\.en\.$"):
        load(path, source_column="data.text.de")


def test_unknown_column_is_refused_with_the_columns_of_parquet(write_parquet):
    expected = r"no column 'de' and no column 'en'.* id, data\.text\.de, data\.text\.en\.$"

    with pytest.raises(ValueError, match=expected):
        load(write_parquet(NESTED), source_column="de", target_column="en")


def test_column_missing_from_a_later_json_line_is_refused(write):
    lines = ['{"source": "a", "target": "b"}', '{"source": "a", "goal": "b"}']

    with pytest.raises(ValueError, match=r"Line 2 of .* no column 'target'.* source, goal\.$"):
        load(write("x.jsonl", lines))


@pytest.mark.parametrize("cell", [None, 17, "\ud83d"])
def test_json_cell_that_is_no_text_is_refused(write, cell):
    lines = [json.dumps({"source": "a", "target": target}) for target in ("b", cell)]
    expected = rf"Row 2 of .* column 'target', got {re.escape(repr(cell))}\."

    with pytest.raises(ValueError, match=expected):
        load(write("x.jsonl", lines))


def test_parquet_cell_that_is_no_text_is_refused_with_its_row(write_parquet, monkeypatch):
    monkeypatch.setattr(data, "_ROWS_AT_A_TIME", 2)
    records = [*RECORDS, {"source": None, "target": "b"}]

    with pytest.raises(ValueError, match=r"Row 4 of .* column 'source', got None\."):
        load(write_parquet(records))


def test_parquet_that_is_none_is_refused(write):
    with pytest.raises(ValueError, match=r"'.*x\.parquet' is not a Parquet file: Parquet magic"):
        load(write("x.parquet", ["This is a line of text."]))


@pytest.mark.parametrize(("name", "kind"), [("x.csv.gz", ".csv"), ("x", "")])
def test_file_of_unknown_kind_is_refused_with_the_known_ones(write, name, kind):
    with pytest.raises(ValueError, match=rf"kind '{kind}'.* \.tsv, \.jsonl, \.json, \.parquet\."):
        load(write(name, ["a,b"]))


def test_missing_file_is_refused_without_asking_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_dataset", None)

    with pytest.raises(FileNotFoundError, match=r"no file '.*missing\.tsv'"):
        load(str(tmp_path / "missing.tsv"))


@pytest.mark.parametrize("error", [FileNotFoundError("not there"), ConnectionError("not there")])
def test_unknown_name_is_refused_as_file_and_as_dataset(monkeypatch, error):
    def load_dataset(*args, **options):
        raise error

    monkeypatch.setattr(data, "load_dataset", load_dataset)

    with pytest.raises(FileNotFoundError, match=r"'team/none' is no file, .* Hub: not there"):
        load("team/none")


def test_unknown_split_of_a_saved_dataset_is_refused_with_the_known_ones(tmp_path):
    pairs = Dataset.from_list(RECORDS)
    DatasetDict({"train": pairs, "valid": pairs}).save_to_disk(tmp_path / "saved")

    with pytest.raises(ValueError, match=r"no split 'test'. Choose from: train, valid\."):
        load(str(tmp_path / "saved"), split="test")


def test_dataset_without_pairs_is_refused(tmp_path):
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"source": pa.array([], pa.string())}), path)

    with pytest.raises(ValueError, match=r"'.*none\.parquet' is empty"):
        load(str(path))


# Tokenizing


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(["aaaabc"], vocab_size=20, kind="char")


@pytest.fixture
def abc_pairs(write):
    return load(write("pairs.tsv", ["abc\taa", "\tbcab", "abca\tabcb", "bbbbbb\ta"]))


def test_tokenizing_adds_ids_that_end_in_eos(abc_pairs, tokenizer):
    tokenized, truncated = tokenize_pairs(abc_pairs, tokenizer, max_length=7)

    assert truncated == 0
    assert tokenized.column_names == ["source", "target", "input_ids", "labels"]
    assert tokenizer.batch_decode(tokenized["input_ids"][:2]) == ["abc</s>", "</s>"]
    assert tokenizer.batch_decode(tokenized["labels"][:2]) == ["aa</s>", "bcab</s>"]


def test_tokenizing_truncates_before_eos_and_counts_pairs(abc_pairs, tokenizer):
    tokenized, truncated = tokenize_pairs(abc_pairs, tokenizer, max_length=4)

    # One pair is too long on its target, one on both sides, one on its source.
    assert truncated == 3
    sources, targets = tokenized["input_ids"][:], tokenized["labels"][:]
    assert tokenizer.batch_decode(sources) == ["abc</s>", "</s>", "abc</s>", "bbb</s>"]
    assert tokenizer.batch_decode(targets) == ["aa</s>", "bca</s>", "abc</s>", "a</s>"]


def test_tokenizing_leaves_the_tokenizer_as_it_was(abc_pairs, tokenizer):
    before = tokenizer.backend_tokenizer.to_str()

    tokenize_pairs(abc_pairs, tokenizer, max_length=4)

    assert tokenizer.backend_tokenizer.to_str() == before


def test_tokenizing_draws_new_segmentations_each_time(abc_pairs):
    tokenizer = VanillaTransformerTokenizer.train(["abc bcab abca " * 9], vocab_size=280)
    tokenizer.backend_tokenizer.model.dropout = 0.5

    draws = [tokenize_pairs(abc_pairs, tokenizer, max_length=20)[0] for _ in range(9)]

    assert len({str(draw["labels"][:]) for draw in draws}) > 1


def test_tokenizing_refuses_a_limit_without_room_for_text(abc_pairs, tokenizer):
    with pytest.raises(ValueError, match=r"at least 2.* got 1\."):
        tokenize_pairs(abc_pairs, tokenizer, max_length=1)


def test_tokenizing_prints_nothing_without_a_terminal(abc_pairs, tokenizer, capfd):
    tokenize_pairs(abc_pairs, tokenizer, max_length=4)

    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_pair_lengths_count_tokens_in_the_order_of_the_dataset(abc_pairs, tokenizer):
    tokenized, _ = tokenize_pairs(abc_pairs, tokenizer, max_length=10)

    lengths = pair_lengths(tokenized.select([3, 1, 0]))

    np.testing.assert_array_equal(lengths, [[7, 2], [1, 5], [4, 3]])


# Batches


@pytest.fixture(scope="module")
def lengths():
    """Lengths like those of a corpus of sentences: skewed, both sides alike but not equal."""
    rng = np.random.default_rng(3)
    source = 3 + rng.gamma(3, 5, 30_000)
    target = source * rng.normal(1, 0.15, len(source)) + rng.normal(0, 1, len(source))
    return np.maximum(1, np.stack([source, target], axis=1).astype(int))


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def cost(lengths, batch):
    return len(batch) * int(lengths[batch].max(axis=0).sum())


def test_batches_hold_every_pair_exactly_once(lengths):
    batches = epoch_of(TokenBatchSampler(lengths, 4096, seed=0), 5)

    assert sorted(chain.from_iterable(batches)) == list(range(len(lengths)))


def test_batches_keep_their_budget(lengths):
    costs = [cost(lengths, batch) for batch in TokenBatchSampler(lengths, 4096, seed=0)]

    assert max(costs) <= 4096
    # One batch holds what is left over; the others could take no further pair of their length.
    assert sorted(costs)[1] > 0.85 * 4096


def test_batch_may_fill_its_budget_to_the_last_token():
    assert len(TokenBatchSampler([(3, 4)] * 6, 21, seed=0)) == 2
    assert len(TokenBatchSampler([(3, 4)] * 6, 20, seed=0)) == 3
    assert len(TokenBatchSampler([(9, 11)], 20, seed=0)) == 1


def test_batch_costs_what_its_own_longest_sides_cost():
    assert len(TokenBatchSampler([(9, 1), (9, 1), (1, 9), (1, 9)], 20, seed=0)) == 2


@pytest.mark.parametrize("max_tokens", [4096, 8192])
def test_padding_stays_below_5_percent(lengths, max_tokens):
    sampler = TokenBatchSampler(lengths, max_tokens, seed=0)

    padded = sum(cost(lengths, batch) for batch in epoch_of(sampler, 1))

    assert sampler.padding == pytest.approx(1 - lengths.sum() / padded)
    assert sampler.padding < 0.05


def test_number_of_batches_is_the_same_in_every_epoch(lengths):
    sampler = TokenBatchSampler(lengths, 2048, seed=0)

    assert {len(epoch_of(sampler, epoch)) for epoch in range(6)} == {len(sampler)}


def test_batches_differ_between_epochs_in_content_and_order(lengths):
    sampler = TokenBatchSampler(lengths, 2048, seed=0)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)

    assert len(set(map(frozenset, first)) & set(map(frozenset, second))) < 0.25 * len(first)
    sizes = [list(map(len, batches)) for batches in (first, second)]
    assert sizes[0] != sizes[1]


def test_batches_come_in_no_order_of_length(lengths):
    longest = [lengths[batch].max() for batch in TokenBatchSampler(lengths, 2048, seed=0)]

    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.2


def test_batches_are_reproduced_by_seed_and_epoch(lengths):
    sampler = TokenBatchSampler(lengths, 2048, seed=11)
    epoch_of(sampler, 0)

    assert epoch_of(sampler, 4) == epoch_of(TokenBatchSampler(lengths, 2048, seed=11), 4)
    assert epoch_of(sampler, 4) != epoch_of(TokenBatchSampler(lengths, 2048, seed=12), 4)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_share_the_batches_of_one_process(lengths, num_processes):
    whole = epoch_of(TokenBatchSampler(lengths, 2048, seed=5), 2)
    shares = [
        epoch_of(
            TokenBatchSampler(
                lengths, 2048, seed=5, num_processes=num_processes, process_index=index
            ),
            2,
        )
        for index in range(num_processes)
    ]

    assert all(map(all, shares))  # no share is empty
    merged = [sorted(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)]
    assert merged == [sorted(batch) for batch in whole]


def test_shares_of_a_batch_differ_by_one_pair_at_most(lengths):
    shares = [
        list(TokenBatchSampler(lengths, 2048, seed=5, num_processes=2, process_index=index))
        for index in range(2)
    ]

    assert max(abs(len(a) - len(b)) for a, b in zip(*shares, strict=True)) <= 1


def test_last_batch_takes_pairs_over_when_a_process_would_have_none():
    # The budget cuts seven pairs of 10 tokens into 6 + 1.
    samplers = [
        TokenBatchSampler([(5, 5)] * 7, 60, seed=0, num_processes=3, process_index=index)
        for index in range(3)
    ]

    assert sorted(map(len, samplers[0])) == [1, 2]
    assert sorted(map(len, samplers[2])) == [1, 1]
    shares = chain.from_iterable(samplers)
    assert sorted(chain.from_iterable(shares)) == list(range(7))


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "enough"),
    [
        ([(5, 5)] * 6, 20, 60),
        # Only the first batches would be too small.
        ([(9, 9)] * 2 + [(10, 1)] * 3, 35, 114),
        # Only the last one would be, and taking pairs over would make it exceed the budget.
        ([(5, 5)] * 6 + [(25, 25)], 60, 300),
    ],
)
def test_sampler_refuses_a_budget_too_small_for_its_processes(lengths, max_tokens, enough):
    expected = rf"3 processes .* `max_tokens` = {max_tokens} .* {enough} is always enough"

    with pytest.raises(ValueError, match=expected):
        TokenBatchSampler(lengths, max_tokens, seed=0, num_processes=3)
    assert len(TokenBatchSampler(lengths, enough, seed=0, num_processes=3)) > 0


def test_sampler_refuses_fewer_pairs_than_processes():
    with pytest.raises(ValueError, match="got 2 pairs for 3 processes"):
        TokenBatchSampler([(5, 5)] * 2, 100, seed=0, num_processes=3)
    with pytest.raises(ValueError, match="got 0 pairs for 1 processes"):
        TokenBatchSampler([], 100, seed=0)


def test_sampler_refuses_a_pair_beyond_the_budget():
    with pytest.raises(ValueError, match=r"got 20 for pair 1 \(counted from 0\) of 21 tokens"):
        TokenBatchSampler([(9, 9), (11, 10), (3, 3)], 20, seed=0)


# In a DataLoader


@pytest.fixture
def corpus(tokenizer):
    """Token ids of 200 pairs; the first token of a source tells pairs apart."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(2, 12, size=(200, 2)).tolist()
    return Dataset.from_dict(
        {
            "input_ids": [[100 + row, *[5] * (s - 2), 2] for row, (s, _) in enumerate(sizes)],
            "labels": [[*[6] * (t - 1), 2] for _, t in sizes],
        }
    )


def first_tokens(loader):
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a single core
@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader_yields_the_sampled_batches_padded(corpus, tokenizer, num_workers):
    sampler = TokenBatchSampler(pair_lengths(corpus), 120, seed=0)
    collate = DataCollatorForSeq2Seq(tokenizer)
    loader = DataLoader(corpus, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers)

    batches = list(loader)

    assert len(batches) == len(loader) == len(sampler)
    assert [(batch["input_ids"][:, 0] - 100).tolist() for batch in batches] == list(sampler)
    assert max(b["input_ids"].numel() + b["labels"].numel() for b in batches) <= 120
    assert all(torch.equal(b["attention_mask"], (b["input_ids"] != 0).long()) for b in batches)


def test_resumed_epoch_goes_on_with_the_batches_that_would_have_followed(corpus, tokenizer):
    def new_loader():
        sampler = TokenBatchSampler(pair_lengths(corpus), 120, seed=0)
        sampler.set_epoch(3)
        return DataLoader(
            corpus, batch_sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer)
        )

    whole = first_tokens(new_loader())
    rest = skip_first_batches(new_loader(), 4)

    assert len(rest) == len(whole) - 4
    assert first_tokens(rest) == whole[4:]


# Checksums


def test_checksum_is_sha256_of_the_bytes(tmp_path):
    content = bytes(range(256)) * 1000
    (tmp_path / "file").write_bytes(content)

    assert checksum(tmp_path / "file") == hashlib.sha256(content).hexdigest()
