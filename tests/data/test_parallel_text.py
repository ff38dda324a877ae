import gzip
import hashlib
import json
import os
import re
import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from vanilla_transformer.data import parallel_text as data
from vanilla_transformer.data.parallel_text import (
    ParallelText,
    load_pairs,
    pair_lengths,
    tokenize_pairs,
)
from vanilla_transformer.files import checksum
from vanilla_transformer.tokenization.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
)
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair

from ..support.full_disk import small_files

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
    def load_dataset(name, config_name, *, split, streaming):
        assert (name, config_name, split) == ("team/corpus", "de-en", "test")
        assert not streaming
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
        from vanilla_transformer.data.parallel_text import ParallelText, load_pairs
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


def test_temporary_files_of_a_killed_process_are_deleted_by_the_next(write, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = """if True:
        import os, signal, sys
        from vanilla_transformer.data.parallel_text import ParallelText, load_pairs
        before = os.listdir(sys.argv[2])
        dataset = load_pairs(ParallelText((sys.argv[1],)))
        print(len(before), len(os.listdir(sys.argv[2])), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", code, write("pairs.tsv", ["eins\tone"]), str(scratch)]
    environment = os.environ | {"TMPDIR": str(scratch)}

    counts = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        for _ in range(2)
    ]

    assert counts == ["0 1\n", "1 1\n"]


def test_pairs_for_which_there_is_no_room_leave_no_file(write):
    path = write("pairs.tsv", ["eins und zwei\tone and two"] * 20_000)
    folder = data._temporary_folder()
    before = set(folder.iterdir())

    with (
        small_files(100_000),
        pytest.raises(OSError, match=rf"no room for a copy of '{path}' of 0\.5 MiB in .* TMPDIR"),
    ):
        load(path)

    assert set(folder.iterdir()) == before


def test_pairs_that_end_in_an_error_leave_no_file(write):
    folder = data._temporary_folder()
    before = set(folder.iterdir())

    with pytest.raises(ValueError, match="Line 2"):
        load(write("pairs.tsv", ["eins\tone", "zwei"]))

    assert set(folder.iterdir()) == before


def test_full_cache_of_datasets_is_told_by_its_own_folder(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    folder = tmp_path / "corpus"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(RECORDS * 2000), folder / "train.parquet")

    with (
        small_files(100_000),
        pytest.raises(OSError, match=rf"no room for the data of '{folder}' in '{cache}'.*HF_HOME"),
    ):
        load(str(folder))


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


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "it has more than 100 levels"),
        ("[" * 100_000, "it has more than 100 levels"),
        ('{"x":' * 100_000 + "1" + "}" * 100_000, "it has more than 100 levels"),
        ('{"x":' * 990 + "1" + "}" * 990, "it has more than 100 levels"),
        ("9" * 5000, "Exceeds the limit"),
    ],
    ids=["lists", "open lists", "objects", "fewer objects", "digits"],
)
def test_json_line_beyond_what_python_reads_is_refused(write, value, reason):
    lines = ['{"source": "a", "target": "b"}', f'{{"source": "a", "target": "b", "x": {value}}}']

    with pytest.raises(
        ValueError, match=rf"^Line 2 of '.*x\.jsonl' must be .*: {reason}.{{,150}}$"
    ):
        load(write("x.jsonl", lines))


def test_json_line_may_have_a_hundred_levels_of_nesting(write):
    columns = {"source": "a", "target": "b", "other": 1}
    for _ in range(99):
        columns["other"] = [columns["other"]]

    assert pairs_of(load(write("x.jsonl", [json.dumps(columns)]))) == [("a", "b")]
    columns["other"] = [columns["other"]]
    with pytest.raises(ValueError, match="more than 100 levels"):
        load(write("x.jsonl", [json.dumps(columns)]))


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
    with pytest.raises(ValueError, match=r"'.*x\.parquet' is damaged.* Parquet magic bytes not"):
        load(write("x.parquet", ["This is a line of text."]))


# Of the row groups, of the magic bytes, and of what the footer tells of columns.
@pytest.mark.parametrize("place", [0.5, 1.0, 0.97])
def test_damaged_parquet_is_refused_by_its_name(tmp_path, place):
    path = tmp_path / "x.parquet"
    text = [f"text {number}" for number in range(2000)]
    pq.write_table(pa.table({"source": text, "target": text}), path)
    content = bytearray(path.read_bytes())
    middle = int(place * len(content))
    for index in range(middle - 60, min(middle + 60, len(content))):
        content[index] ^= 0x55
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"'.*x\.parquet' is damaged, or no data .* again\.$"):
        load(str(path))


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    offsets, content = pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")
    source = pa.Array.from_buffers(pa.string(), 1, [None, offsets, content])
    pq.write_table(pa.table({"source": source, "target": ["b"]}), path)

    with pytest.raises(ValueError, match=r"'.*x\.parquet' is damaged.*byte 0xff in position 1"):
        load(str(path))


def test_parquet_with_two_columns_of_a_name_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    names = ["source", "target", "target"]
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=names), path)

    with pytest.raises(ValueError, match=r"'.*x\.parquet' must have one column 'target', got sev"):
        load(str(path))


@pytest.fixture
def saved(tmp_path):
    Dataset.from_list(RECORDS * 100).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_saved_dataset_that_is_cut_is_refused_by_its_name(saved):
    (file,) = saved.glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with pytest.raises(ValueError, match=r"'.*saved' is damaged.*Expected to be able to read"):
        load(str(saved))


def test_saved_dataset_with_metadata_of_another_form_is_refused_by_its_name(saved):
    (saved / "state.json").write_text("[]", encoding="utf-8")

    with pytest.raises(ValueError, match=r"'.*saved' is damaged.*TypeError"):
        load(str(saved))


def test_saved_dataset_that_lost_a_file_is_refused(saved):
    (file,) = saved.glob("*.arrow")
    file.unlink()

    with pytest.raises(FileNotFoundError, match=str(file)):
        load(str(saved))


def test_folder_of_damaged_files_is_refused_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text("[[[[", encoding="utf-8")

    with pytest.raises(ValueError, match=r"'.*corpus' is damaged, or no data .* again\.$"):
        load(str(folder))


def test_fault_of_the_system_is_not_taken_for_damage(monkeypatch):
    def load_dataset(*args, **options):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(data, "load_dataset", load_dataset)

    with pytest.raises(OSError, match=r"^\[Errno 13\] Permission denied$"):
        load("team/corpus")


def test_folder_in_the_place_of_a_text_file_is_refused(tmp_path, write):
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        load(write("a", ["eins"]), str(tmp_path))


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
    tokenized, truncated = tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=7)

    assert truncated == 0
    assert tokenized.column_names == ["source", "target", "input_ids", "labels"]
    assert tokenizer.batch_decode(tokenized["input_ids"][:2]) == ["abc</s>", "</s>"]
    assert tokenizer.batch_decode(tokenized["labels"][:2]) == ["aa</s>", "bcab</s>"]


def test_tokenizing_truncates_before_eos_and_counts_pairs(abc_pairs, tokenizer):
    tokenized, truncated = tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=4)

    # One pair is too long on its target, one on both sides, one on its source.
    assert truncated == 3
    sources, targets = tokenized["input_ids"][:], tokenized["labels"][:]
    assert tokenizer.batch_decode(sources) == ["abc</s>", "</s>", "abc</s>", "bbb</s>"]
    assert tokenizer.batch_decode(targets) == ["aa</s>", "bca</s>", "abc</s>", "a</s>"]


def test_tokenizing_takes_the_tokenizer_of_each_side(abc_pairs, tokenizer):
    other = VanillaTransformerTokenizer.train(["cba"], vocab_size=9, kind="char")
    assert other("abc")["input_ids"] != tokenizer("abc")["input_ids"]

    tokenized, _ = tokenize_pairs(abc_pairs, TokenizerPair(tokenizer, other), max_length=7)

    assert tokenizer.batch_decode(tokenized["input_ids"][:2]) == ["abc</s>", "</s>"]
    assert other.batch_decode(tokenized["labels"][:2]) == ["aa</s>", "bcab</s>"]


def test_tokenizing_leaves_the_tokenizer_as_it_was(abc_pairs, tokenizer):
    before = tokenizer.backend_tokenizer.to_str()

    tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=4)

    assert tokenizer.backend_tokenizer.to_str() == before


def test_tokenizing_draws_new_segmentations_each_time(abc_pairs):
    tokenizer = VanillaTransformerTokenizer.train(["abc bcab abca " * 9], vocab_size=280)
    tokenizer.backend_tokenizer.model.dropout = 0.5

    draws = [
        tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=20)[0]
        for _ in range(9)
    ]

    assert len({str(draw["labels"][:]) for draw in draws}) > 1


def test_tokenizing_refuses_a_limit_without_room_for_text(abc_pairs, tokenizer):
    with pytest.raises(ValueError, match=r"at least 2.* got 1\."):
        tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=1)


def test_tokenizing_tells_a_full_disk(write, tokenizer):
    pairs = load(write("pairs.tsv", ["abc\tabc"] * 5_000))

    with (
        small_files(100_000),
        pytest.raises(OSError, match=r"no room for the token ids of the pairs in .* TMPDIR"),
    ):
        tokenize_pairs(pairs, TokenizerPair.joint(tokenizer), max_length=10)


def test_tokenizing_prints_nothing_without_a_terminal(abc_pairs, tokenizer, capfd):
    tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=4)

    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()


def test_pair_lengths_count_tokens_in_the_order_of_the_dataset(abc_pairs, tokenizer):
    tokenized, _ = tokenize_pairs(abc_pairs, TokenizerPair.joint(tokenizer), max_length=10)

    lengths = pair_lengths(tokenized.select([3, 1, 0]))

    np.testing.assert_array_equal(lengths, [[7, 2], [1, 5], [4, 3]])


# Checksums


def test_checksum_is_sha256_of_the_bytes(tmp_path):
    content = bytes(range(256)) * 1000
    (tmp_path / "file").write_bytes(content)

    assert checksum(tmp_path / "file") == hashlib.sha256(content).hexdigest()
