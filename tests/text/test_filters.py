"""Filters of training pairs: what each drops, and that nothing is lost."""

import json
import pickle

import datasets
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
    total, *rows = judged.summary()
    assert total == "dropped     6 of 9 pairs, see dropped.jsonl"
    assert [row.split() for row in rows] == [["1", name] for _, name in DROPPED]
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


def test_stream_is_read_without_a_copy_but_for_what_the_tokenizer_learns_from(
    tmp_path, monkeypatch
):
    cache, folder = tmp_path / "cache", tmp_path / "dataset"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    folder.mkdir()
    pairs = [*((f"d{n}", f"e{n}") for n in range(9)), ("same", "same")]
    nested = [json.dumps({"translation": dict(zip("de", pair, strict=True))}) for pair in pairs]
    for part in range(2):
        lines = nested[5 * part : 5 * part + 5]
        (folder / f"train-{part}.jsonl").write_text("\n".join(lines))
    settings = {"source_column": "translation.d", "target_column": "translation.e"}
    settings |= {"streaming": True, "tokenizer_pairs": 5}
    settings |= ALL_FILTERS | {"filter_overlap": [], "filter_duplicates": False}

    corpus = read_corpus(TrainSettings(train=[str(folder)], **settings))

    assert pairs_of(corpus.filtered.kept) == pairs[:5]
    # As workers get the reader.
    assert [*pickle.loads(pickle.dumps(corpus.read))()] == pairs[:9]
    assert not list(cache.rglob("*.arrow"))


def test_missing_file_of_overlap_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.en"):
        drop_rules(TrainSettings(filter_overlap=[str(tmp_path / "missing.en")]), None)


@pytest.mark.parametrize(
    ("training", "said"),
    [("ab", "has 20 % of them"), ("a", "has 10 % of them"), ("klm", ""), ("aaB", "has 10 %")],
)
def test_validation_pairs_that_training_has_are_doubted(write, caplog, training, said):
    train = [write("train", *training), write("train.x", *training.upper())]
    held = [write("held", *"abcdefghij"), write("held.x", *"ABCDEFGHIJ")]

    read_corpus(TrainSettings(train=train, validation=held))

    assert said in caplog.text
    assert ("--validation should hold other pairs" in caplog.text) == bool(said)


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
