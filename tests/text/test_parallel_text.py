import gzip
import json
import lzma
import re
from itertools import chain
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from vanilla_transformer_tools.text import parallel_text as data
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs

from ..support.full_disk import small_files

# Blanks at the ends, an empty side, quotes, and separators that end a line for others only. A file
# whose first line ends in a carriage return would not be read the quick way.
PAIRS = [
    ("", "Nothing\x85said.\x0c"),
    (" Ein Hund\u2028rennt. ", "A dog runs.\r"),
    ("Zwei  Männer \N{DOG FACE}", ""),
    ('"Er sagt', "'yes\""),
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
        compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(compress(content))
        return str(path)

    return write_file


@pytest.fixture
def write_records(write, tmp_path):
    """Writes pairs in the form that a name asks for; without a suffix it is a saved dataset."""

    def write_form(name, records=RECORDS):
        path = tmp_path / name
        if ".json" in name:
            write(name, map(json.dumps, records))
        elif ".tsv" in name.lower():
            write(name, ("\t".join(record.values()) for record in records))
        elif name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(records), path)
        else:
            Dataset.from_list(records).save_to_disk(path)
        return str(path)

    return write_form


def load(*paths, **options):
    return load_pairs(ParallelText(paths, **options))


def pairs_of(dataset):
    assert dataset.column_names == ["source", "target"]
    return [(row["source"], row["target"]) for row in dataset]


# Reading


@pytest.mark.parametrize(
    "names", [("text.de", "text.en"), ("text.de.gz", "text.en"), ("a.xz", "b")]
)
def test_two_files_give_every_pair_unaltered(write, names):
    paths = [write(name, lines) for name, lines in zip(names, (SOURCES, TARGETS), strict=True)]

    assert pairs_of(load(*paths)) == PAIRS


def test_several_files_of_pairs_are_read_in_order(write_records):
    files = [
        write_records(name, [{"source": name, "target": str(number)} for number in range(3)])
        for name in ("b.tsv", "a.jsonl", "c.parquet")
    ]

    pairs = pairs_of(load(*files))

    assert pairs == [
        (name, str(number)) for name in ("b.tsv", "a.jsonl", "c.parquet") for number in range(3)
    ]


def test_faults_name_the_file_among_several(write):
    good, longer = (write("1.de", ["1"]), write("1.en", ["1"])), write("2.de", ["1"] * 2)

    with pytest.raises(ValueError, match=r"got 2 in '.*2\.de' and 1 in '.*1\.en'"):
        load(*good, longer, good[1])
    with pytest.raises(ValueError, match=r"^'.*3\.de' is empty"):
        load(*good, write("3.de", [], end=""), write("3.en", [], end=""))


@pytest.mark.parametrize(
    "files",
    [{"b.de": ["ja", "nein"], "b.en": ["yes\r", "no\r"]}, {"d.tsv": ["ja\tyes\r", "nein\tno\r"]}],
)
def test_line_ends_of_windows_are_told_once_and_stay(write, caplog, files):
    paths = [write(name, lines) for name, lines in files.items()]
    text = "\n".join(chain.from_iterable(files.values())).replace("\t", "\n").split("\n")

    for _ in range(2):
        pairs = load(*paths)

    assert sorted(chain(pairs["source"], pairs["target"])) == sorted(text)
    (message,) = caplog.messages
    assert message.startswith(" and ".join(map(repr, paths)))
    assert "lines end with a carriage return" in message


@pytest.mark.parametrize(
    ("name", "records", "options"),
    [
        *[(f"pairs.{kind}", RECORDS, {}) for kind in ("tsv", "tsv.gz", "json", "jsonl.xz")],
        ("PAIRS.TSV", RECORDS, {}),
        ("pairs.parquet", RECORDS, {}),
        ("saved", RECORDS, {}),
        *[(name, NESTED, DE_EN) for name in ("pairs.jsonl", "pairs.parquet", "saved")],
    ],
)
def test_one_path_gives_every_pair_unaltered(write_records, monkeypatch, name, records, options):
    # In two chunks, the last one shorter.
    monkeypatch.setattr(data, "ROWS_AT_A_TIME", 3)

    assert pairs_of(load(write_records(name, records), **options)) == PAIRS


def test_saved_dataset_gives_the_split_asked_for(tmp_path):
    other = Dataset.from_list([{"source": "ja", "target": "yes"}])
    splits = {"train": other, "validation": Dataset.from_list(RECORDS)}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")

    assert pairs_of(load(str(tmp_path / "saved"), split="validation")) == PAIRS
    with pytest.raises(ValueError, match=r"no split 'test'. Choose from: train, validation\."):
        load(str(tmp_path / "saved"), split="test")


def test_named_dataset_is_loaded_with_its_configuration_and_split(monkeypatch):
    def load_dataset(name, config_name, *, split, streaming):
        assert (name, config_name, split) == ("team/corpus", "de-en", "test")
        assert not streaming
        # Reversed twice: its rows have another order than its table.
        return Dataset.from_list(NESTED[::-1]).select([3, 2, 1, 0])

    monkeypatch.setattr(data, "load_dataset", load_dataset)

    dataset = load("team/corpus", config_name="de-en", split="test", **DE_EN)

    assert pairs_of(dataset) == PAIRS


def test_pairs_that_cannot_be_stored_leave_no_file(write):
    path = write("pairs.tsv", ["eins und zwei\tone and two"] * 20_000)
    folder = data._temporary_folder()
    before = set(folder.iterdir())

    with (
        small_files(100_000),
        pytest.raises(OSError, match=rf"no room for a copy of '{path}' of 0\.5 MiB in .* TMPDIR"),
    ):
        load(path)
    with pytest.raises(ValueError, match="Line 2"):
        load(write("pairs.tsv", ["eins\tone", "zwei"]))

    assert set(folder.iterdir()) == before


def test_folder_of_data_files_is_a_dataset_and_its_full_cache_is_told(tmp_path, monkeypatch):
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
    assert pairs_of(load(str(folder))) == PAIRS * 2000


# Errors of reading


def test_two_files_of_unequal_length_are_refused(write):
    short, long = write("a", ["1"] * 3), write("b", ["1"] * 1_205)

    with pytest.raises(ValueError, match=r"got 3 in '.*a' and 1,205 in '.*b': '.*b' .* 1,202\."):
        load(short, long)
    with pytest.raises(ValueError, match=r"got 1,205 in '.*b' and 3 in '.*a': '.*b' .* 1,202\."):
        load(long, short)


@pytest.mark.parametrize(
    "paths", [(), ("a", "b", "c"), ("a.tsv", "b.de", "b.en"), ("b.de", "a.jsonl")]
)
def test_parallel_text_refuses_files_that_do_not_go_together(paths):
    with pytest.raises(ValueError, match=re.escape(f"{paths}.")):
        ParallelText(paths)


PAIR = '{"source": "a", "target": "b"}'


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.tsv", ["a\tb", "no tab"], r"Line 2 of '.*x\.tsv' .* got 0 tabs"),
        ("x.tsv", ["a\tb", "a\tb\tc"], r"Line 2 of '.*x\.tsv' .* got 2 tabs"),
        *[
            ("x.jsonl", [PAIR, line], rf"Line 2 of .* a JSON object, got {re.escape(repr(line))}")
            for line in ("{'source'", "", "[1, 2]")
        ],
        ("x.json", ["[", f"{PAIR},"], r"got '\['.* jq -c '\.\[\]' old"),
        ("x.json", ["{", '"source": "a"'], r"got '\{'.* jq -c '\.' old"),
        (
            "x.jsonl",
            [PAIR, '{"source": "a", "goal": "b"}'],
            r"Line 2 .* 'target'.* source, goal\.$",
        ),
        *[
            ("x.jsonl", [PAIR, json.dumps({"source": "a", "target": cell})], message)
            for cell in (None, "\ud83d")
            for message in [rf"Row 2 of .* column 'target', got {re.escape(repr(cell))}\."]
        ],
        ("x.csv.gz", ["a,b"], r"kind '\.csv'.* \.tsv, \.jsonl, \.json, \.parquet\."),
        ("x", ["a,b"], "kind ''"),
    ],
)
def test_file_with_a_fault_is_refused_with_its_place(write, name, lines, message):
    with pytest.raises(ValueError, match=message):
        load(write(name, lines))


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_unknown_columns_are_refused_with_those_there_are(write_records, name):
    expected = r"no column 'de' and no column 'en'.* id, data\.text\.de, data\.text\.en\.$"

    with pytest.raises(ValueError, match=expected):
        load(write_records(name, NESTED), source_column="de", target_column="en")


def test_parquet_cell_that_is_no_text_is_refused_with_its_row(write_records, monkeypatch):
    monkeypatch.setattr(data, "ROWS_AT_A_TIME", 2)
    records = [*RECORDS, {"source": None, "target": "b"}]

    with pytest.raises(ValueError, match=r"Row 5 of .* column 'source', got None\."):
        load(write_records("pairs.parquet", records))


# Of the row groups, and of what the footer tells of columns.
@pytest.mark.parametrize("place", [0.5, 0.97])
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


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("data-00000-of-00001.arrow", 900, "Expected to be able to read"),
        # A list, where an object is expected.
        ("state.json", 0, "TypeError"),
    ],
)
def test_saved_dataset_that_is_cut_is_refused_by_its_name(write_records, name, size, reason):
    saved = write_records("saved", RECORDS * 100)
    content = Path(saved, name).read_bytes()[:size]
    Path(saved, name).write_bytes(content or b"[]")

    with pytest.raises(ValueError, match=rf"'{saved}' is damaged.*{reason}"):
        load(saved)


def test_dataset_without_pairs_is_refused(tmp_path):
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"source": pa.array([], pa.string())}), path)

    with pytest.raises(ValueError, match=r"'.*none\.parquet' is empty"):
        load(str(path))


def test_missing_file_is_refused_without_asking_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load_dataset", None)

    with pytest.raises(FileNotFoundError, match=r"no file: '.*missing\.tsv'"):
        load(str(tmp_path / "missing.tsv"))


def test_unknown_name_is_refused_as_file_and_as_dataset(monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("not there")

    monkeypatch.setattr(data, "load_dataset", load_dataset)

    with pytest.raises(FileNotFoundError, match=r"'team/none' is no file, .* Hub: not there"):
        load("team/none")
