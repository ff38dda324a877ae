"""Filters of training pairs: what each drops, and that nothing is lost."""

import json
import pickle

import pytest
from datasets import Dataset

from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text import filters
from vanilla_transformer_tools.text.filters import (
    DROPPED_FILE,
    drop_rules,
    filter_pairs,
    read_corpus,
)
from vanilla_transformer_tools.text.parallel_text import COLUMNS, ParallelText, load_pairs
from vanilla_transformer_tools.training.run import train

from ..support.training_runs import SIZES, build_arguments, read_json

# One pair for each filter, among others that every filter keeps.
PAIRS = [
    ("Ein Hund.", "A dog."),
    ("Zwei\tHunde.", " \t"),
    ("Okay.", "Okay."),
    ("Ein langer Satz über Hunde.", "A long sentence about dogs."),
    ("Ein Hund.", "A dog\u2028\ttoo."),
    ("Nein!", "Certainly not!"),
    ("Der Test.", "The test."),
    ("Ein Hund.", "A dog."),
    ("Eine Katze.", "A cat."),
]
KEPT = [0, 4, 8]
DROPPED = [
    (1, "empty"),
    (2, "identical"),
    (3, "max_characters"),
    (5, "max_ratio"),
    (6, "overlap"),
    (7, "duplicates"),
]
ALL_FILTERS = {
    "filter_empty": True,
    "filter_identical": True,
    "filter_max_characters": 16,
    "filter_max_ratio": 2.0,
    "filter_duplicates": True,
}


@pytest.fixture
def dataset(write):
    """`PAIRS` as training reads them."""
    return load_pairs(ParallelText((write("pairs.jsonl", *records(PAIRS)),)))


def records(pairs):
    return [json.dumps({"source": source, "target": target}) for source, target in pairs]


def pairs_of(pairs):
    return list(zip(pairs["source"], pairs["target"], strict=True))


def as_dataset(*pairs):
    return Dataset.from_list([{"source": source, "target": target} for source, target in pairs])


def filtered(pairs, validation=None, **settings):
    return filter_pairs(pairs, drop_rules(TrainSettings(**settings), validation))


def dropped_by(pairs, validation=None, **settings):
    """The pairs that the filters drop, where they keep at least a last one."""
    kept = ("gut", "good")
    result = filtered(as_dataset(*pairs, kept), validation, **settings)
    assert pairs_of(result.kept)[-1] == kept
    return [pair for pair, verdict in zip(pairs, result.verdicts, strict=False) if verdict]


# What each filter drops


@pytest.mark.parametrize(
    ("settings", "dropped", "kept"),
    [
        ({"filter_empty": True}, [("", "a"), ("a", " \t\u3000"), ("", "")], [("a", " b ")]),
        ({"filter_identical": True}, [("Okay.", "Okay.")], [("okay.", "Okay.")]),
        (
            {"filter_max_characters": 4},
            [("12345", "1"), ("1", "12345")],
            [("1234", "äöü\N{DOG FACE}")],
        ),
        (
            {"filter_max_ratio": 2.0},
            [("1234567", "123"), ("12", "12345"), ("", "1"), ("1", "")],
            [("123456", "123"), ("12", "1234"), ("", "")],
        ),
        # Pairs that differ only in where one side ends and the other begins.
        ({"filter_duplicates": True}, [], [("ab", "c"), ("a", "bc"), ("a\0b", "c"), ("a", "b\0c")]),
    ],
    ids=["empty", "identical", "max_characters", "max_ratio", "duplicates"],
)
def test_filter_drops_its_pairs_and_no_others(settings, dropped, kept):
    assert dropped_by([*dropped, *kept], **settings) == dropped


def test_duplicates_are_dropped_but_for_the_first():
    pairs = as_dataset(("a", "b"), ("a", "c"), ("a", "b"), ("d", "b"), ("a", "b"))

    assert filtered(pairs, filter_duplicates=True).verdicts.tolist() == [0, 0, 1, 0, 1]


def test_pairs_with_other_tags_are_no_duplicates(tmp_path):
    rows = [("Tom", "Tom", tag) for tag in ("en", "nl", "en")]
    pairs = Dataset.from_dict(dict(zip(COLUMNS, zip(*rows, strict=True), strict=True)))

    kept = filtered(pairs, filter_duplicates=True)
    kept.write_dropped(tmp_path)

    assert kept.verdicts.tolist() == [0, 0, 1]
    (record,) = map(json.loads, read_lines(tmp_path / DROPPED_FILE))
    names = {"source": "Tom", "target": "Tom", "tag": "en"}
    assert record == {"line": 3, "filter": "duplicates"} | names


# Overlap with evaluation sets


def test_overlap_drops_pairs_that_share_a_side_with_validation_on_either_side():
    validation = as_dataset(("Der Test.", "The test."), ("", "x"))
    shared = [
        ("Der Test.", "The exam."),
        ("Die Prüfung.", "The test."),
        ("The test.", "Le test."),
        ("Een test.", "Der Test."),
    ]
    # An empty side is nothing to share.
    others = [("Der Test. Nun.", "The test. Now."), ("", "y"), ("z", " ")]

    assert dropped_by(shared + others, validation, filter_overlap=[]) == shared


@pytest.mark.parametrize(
    ("text", "retyped"),
    [
        ("Der Test...", " DER \u00a0TEST…\r"),
        ("Test", "\N{FULLWIDTH LATIN CAPITAL LETTER T}e\N{LATIN SMALL LETTER LONG S}t"),
        ("Caf\u00e9", "cafe\u0301"),
        ("№ 5", "No 5"),
        ("Lego™", "LegoTM"),
        ("ⅻ", "XII"),
        # Marks in either order are one character, and folding makes a letter of the first.
        ("\u03b1\u0345\u0301", "\u03b1\u0301\u0345"),
        # Folded, the small letters of the first are not composed, for there is no capital that is.
        ("\u03d4\u0301", "\u03b0"),
    ],
)
def test_overlap_ignores_case_white_space_and_compatibility_forms(text, retyped):
    for evaluated, trained in ((text, retyped), (retyped, text)):
        validation = as_dataset((evaluated, "x"))

        assert dropped_by([(trained, "y")], validation, filter_overlap=[]) == [(trained, "y")]


def test_overlap_reads_files_of_every_kind_beside_validation(write):
    files = [
        write("text.de", "aus Text"),
        write("pairs.tsv", "aus TSV\tfrom TSV"),
        write("pairs.jsonl", '{"de": "aus JSON", "en": "from JSON"}'),
    ]
    sides = ["aus Text", "aus TSV", "from TSV", "aus JSON", "from JSON", "validation"]
    pairs = [(side, "other") for side in sides]

    found = dropped_by(
        pairs,
        as_dataset(("validation", "x")),
        filter_overlap=files,
        source_column="de",
        target_column="en",
    )

    assert found == pairs


# Nothing is lost


@pytest.fixture
def judged(dataset, write, monkeypatch):
    """`PAIRS` after all filters, in several batches, the last one shorter."""
    monkeypatch.setattr(filters, "ROWS_AT_A_TIME", 3)
    return filtered(dataset, filter_overlap=[write("test.en", "The test.")], **ALL_FILTERS)


def test_each_filter_drops_its_own_pair_into_the_file(judged, tmp_path):
    judged.write_dropped(tmp_path)

    assert pairs_of(judged.kept) == [PAIRS[place] for place in KEPT]
    assert judged.dropped == {name: 1 for _, name in DROPPED}
    assert [json.loads(line) for line in read_lines(tmp_path / "dropped.jsonl")] == [
        {"line": row + 1, "filter": name, "source": PAIRS[row][0], "target": PAIRS[row][1]}
        for row, name in DROPPED
    ]


def test_dropped_file_is_there_exactly_when_there_are_filters(dataset, tmp_path):
    unfiltered = filtered(dataset)
    unfiltered.write_dropped(tmp_path)
    assert (pairs_of(unfiltered.kept), list(unfiltered.summary())) == (PAIRS, [])
    assert not (tmp_path / "dropped.jsonl").exists()

    filtered(dataset, filter_max_characters=1000).write_dropped(tmp_path)
    assert (tmp_path / "dropped.jsonl").read_bytes() == b""


def test_filters_that_leave_nothing_are_refused_with_their_counts(dataset):
    with pytest.raises(ValueError, match=r"got all 9 dropped: empty 1, max_characters 8\."):
        filtered(dataset, filter_empty=True, filter_max_characters=1, filter_duplicates=True)


# In a run


@pytest.fixture
def run_settings(write):
    """Settings of a short run on pairs of which two are dropped."""
    numbers = [(f"eins {n}", f"one {n}") for n in range(20)]
    pairs = [("leer", ""), *numbers, ("eins 3", "one 3")]
    return {
        "train": [write("train.jsonl", *records(pairs))],
        "config": SIZES,
        "vocab_size": 300,
        "filter_empty": True,
        "filter_duplicates": True,
    }


def test_run_trains_on_what_is_kept_and_records_what_is_dropped(
    run_settings, write, tmp_path, capsys
):
    test = write("test.txt", "one 7", "one 8")
    validation = write("validation.jsonl", *records([("eins 5", "one five")]))
    given = {"tokenizer_kind": "word", "validation": [validation], "filter_overlap": [test]}
    settings = TrainSettings(**run_settings | given)
    folder = tmp_path / "run"

    train(settings, build_arguments(settings, folder))

    dropped = [json.loads(line) for line in read_lines(folder / "dropped.jsonl")]
    assert [(line["line"], line["filter"]) for line in dropped] == [
        (1, "empty"),
        (7, "overlap"),
        (9, "overlap"),
        (10, "overlap"),
        (22, "duplicates"),
    ]
    run = read_json(folder / "run.json")
    assert run["pairs"] == 17
    assert run["dropped_pairs"] == {"empty": 1, "overlap": 3, "duplicates": 1}
    assert run["sha256"].keys() == {"train.jsonl", "validation.jsonl", "test.txt"}
    printed = capsys.readouterr().out
    assert "dropped     5 of 22 pairs" in printed
    assert "pairs       17," in printed
    vocabulary = read_json(folder / "tokenizer.json")["model"]["vocab"]
    assert "9" in vocabulary
    assert not {"leer", "8"} & vocabulary.keys()


def test_reader_of_pairs_keeps_tags_and_can_be_sent_to_workers(write):
    rows = [("a", "b", "de"), ("a", "", "de"), ("a", "b", "en")]
    file = write("train.tsv", *map("\t".join, rows))
    settings = TrainSettings(train=[file], tag_column="tag", filter_empty=True)

    read = pickle.loads(pickle.dumps(filters.read_corpus(settings).read))

    assert [*read()] == [rows[0], rows[2]]


def test_missing_file_of_overlap_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.en"):
        drop_rules(TrainSettings(filter_overlap=[str(tmp_path / "missing.en")]), None)


# Languages of the pairs


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (["de"] * 99 + ["Hund"], "of 100 pairs, got 1 tags of one pair only: 'Hund' (line 101)."),
        ([f"w{number}" for number in range(100)], "'w0' (line 2), 'w1' (line 3), 'w2' (line 4), "),
        (["de"] * 98 + ["Hund"], ""),
        (["de"] * 98 + ["fr"] * 2, ""),
        (None, ""),
    ],
)
def test_tag_of_one_pair_among_many_is_doubted(write, caplog, tags, said):
    tags = ["", *tags] if tags else None
    records = [
        json.dumps({"source": "a b", "target": "" if row == 0 else "c", "tag": tag})
        for row, tag in enumerate(tags or [""] * 101)
    ]
    settings = TrainSettings(
        train=[write("tagged.jsonl", *records)],
        tag_column="tag" if tags else None,
        filter_empty=True,
    )

    read_corpus(settings)

    assert said in caplog.text
    assert ("--tag_column must hold" in caplog.text) == bool(said)
