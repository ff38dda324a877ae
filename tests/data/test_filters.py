"""Filters of training pairs: what each drops, and that nothing is lost."""

import json
import re
import sys
from collections import Counter
from itertools import chain
from unicodedata import normalize

import numpy as np
import pytest
from datasets import Dataset

from vanilla_transformer.data import filters
from vanilla_transformer.data.filters import drop_rules, filter_pairs
from vanilla_transformer.data.parallel_text import ParallelText, load_pairs
from vanilla_transformer.files import read_lines
from vanilla_transformer.training import run as training
from vanilla_transformer.training.run import train
from vanilla_transformer_cli import main
from vanilla_transformer_cli.settings import TrainSettings

from ..support.training_runs import SIZES, build_arguments, checkpoints_of, read_json

# One pair for each filter, among others that every filter keeps.
PAIRS = [
    ("Ein Hund.", "A dog."),
    ("Zwei\tHunde.", " \t"),
    ("Okay.", "Okay."),
    ("Ein langer Satz über Hunde.", "A long sentence about dogs."),
    ("Ein Hund.", "A dog\u2028\ttoo."),
    ("Nein!", "Certainly not!"),
    ("Собака.", "A dog."),
    ("Der Test.", "The test."),
    ("Ein Hund.", "A dog."),
    ("Eine Katze.", "A cat."),
]
KEPT = [0, 4, 9]
DROPPED = [
    (1, "empty"),
    (2, "identical"),
    (3, "max_characters"),
    (5, "max_ratio"),
    (6, "script"),
    (7, "overlap"),
    (8, "duplicates"),
]
ALL_FILTERS = {
    "filter_empty": True,
    "filter_identical": True,
    "filter_max_characters": 16,
    "filter_max_ratio": 2.0,
    "filter_script": ["Latn", "Latn"],
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


def test_no_filter_works_unasked(dataset):
    assert pairs_of(filtered(dataset).kept) == PAIRS


def test_empty_drops_pairs_with_a_blank_side():
    pairs = [("", "a"), ("a", " \t\u3000"), ("", ""), ("a", " b ")]

    assert dropped_by(pairs, filter_empty=True) == pairs[:3]


def test_identical_drops_pairs_of_twice_the_same_text():
    pairs = [("Okay.", "Okay."), ("okay.", "Okay.")]

    assert dropped_by(pairs, filter_identical=True) == pairs[:1]


def test_max_characters_drops_pairs_whose_longer_side_exceeds_it():
    pairs = [("12345", "1"), ("1", "12345"), ("1234", "äöü\N{DOG FACE}")]

    assert dropped_by(pairs, filter_max_characters=4) == pairs[:2]


def test_max_ratio_drops_pairs_whose_longer_side_exceeds_it():
    pairs = [("1234567", "123"), ("12", "12345"), ("123456", "123"), ("12", "1234")]

    assert dropped_by(pairs, filter_max_ratio=2.0) == pairs[:2]


def test_max_ratio_drops_pairs_with_one_empty_side():
    pairs = [("", "1"), ("1", ""), ("", "")]

    assert dropped_by(pairs, filter_max_ratio=100.0) == pairs[:2]


def test_duplicates_are_dropped_but_for_the_first():
    pairs = as_dataset(("a", "b"), ("a", "c"), ("a", "b"), ("d", "b"), ("a", "b"))

    assert filtered(pairs, filter_duplicates=True).verdicts.tolist() == [0, 0, 1, 0, 1]


def test_duplicates_keep_pairs_that_differ_in_the_place_of_the_cut_alone():
    pairs = [("ab", "c"), ("a", "bc"), ("a\0b", "c"), ("a", "b\0c")]

    assert dropped_by(pairs, filter_duplicates=True) == []


# The script


@pytest.mark.parametrize(
    ("code", "good", "bad"),
    [
        ("Latn", "Ærø ﬁn", "собака"),
        ("Cyrl", "собака", "sobaka"),
        ("Arab", "كلب", "کלב"),
        ("Hans", "小狗", "イヌ"),
        ("Jpan", "犬がスキー", "강아지"),
        ("Kore", "강아지 犬", "イヌ"),
        ("Cyrl+Latn", "собака dog", "小狗"),
    ],
)
def test_script_drops_pairs_in_another_one(code, good, bad):
    pairs = as_dataset((bad, "dog"), (good, "dog"))

    assert filtered(pairs, filter_script=[code, "Latn"]).verdicts.tolist() == [1, 0]


def test_script_of_each_side_is_its_own():
    pairs = as_dataset(("собака", "dog"), ("собака", "собака"), ("dog", "dog"), ("dog", "собака"))

    assert filtered(pairs, filter_script=["Cyrl", "Latn"]).verdicts.tolist() == [0, 1, 1, 1]


def test_script_allows_other_letters_up_to_a_half():
    pairs = [("Hunden собака", "a"), ("Hunde собака", "a")]

    assert dropped_by(pairs, filter_script=["Latn", "Latn"]) == pairs[1:]


def test_script_counts_neither_digits_nor_signs_nor_marks():
    # Beside the letters of both scripts 6 times as many signs, which would hide those of Cyrillic.
    pairs = [("12:30 (!?) …", "½"), ("a собака 1234567890", "a"), ("e\u0301\u0301\u0301", "a")]

    assert dropped_by(pairs, filter_script=["Latn", "Latn"]) == pairs[1:2]


# Overlap with evaluation sets


def test_overlap_drops_pairs_that_share_a_side_with_validation():
    validation = as_dataset(("Der Test.", "The test."))
    pairs = [
        ("Der Test.", "The exam."),
        ("Die Prüfung.", "The test."),
        ("Der Test. Nun.", "The test. Now."),
    ]

    assert dropped_by(pairs, validation, filter_overlap=[]) == pairs[:2]


def test_overlap_finds_a_side_of_the_other_direction():
    validation = as_dataset(("Der Test.", "The test."))
    pairs = [("The test.", "Le test."), ("Een test.", "Der Test.")]

    assert dropped_by(pairs, validation, filter_overlap=[]) == pairs


@pytest.mark.parametrize(
    "text",
    [
        "DER TEST…",
        " Der \u00a0Test...\r",
        "Der \N{FULLWIDTH LATIN CAPITAL LETTER T}est...",
        "Der Te\N{LATIN SMALL LETTER LONG S}t...",
    ],
)
def test_overlap_ignores_case_white_space_and_compatibility_forms(text):
    validation = as_dataset(("Der Test...", "x"))

    assert dropped_by([(text, "y")], validation, filter_overlap=[]) == [(text, "y")]


@pytest.mark.parametrize(
    ("text", "retyped"),
    [
        ("№ 5", "No 5"),
        ("Lego™", "LegoTM"),
        ("℡ 110", "Tel 110"),
        ("ⅻ", "XII"),
        # Marks in either order are one character, and folding makes a letter of the first.
        ("\u03b1\u0345\u0301", "\u03b1\u0301\u0345"),
        # Folded, the small letters of the first are not composed, for there is no capital that is.
        ("\u03d4\u0301", "\u03b0"),
    ],
)
def test_overlap_folds_the_case_of_what_a_compatibility_form_stands_for(text, retyped):
    for pair in ((text, retyped), (retyped, text)):
        evaluated, trained = pair
        validation = as_dataset((evaluated, "x"))

        assert dropped_by([(trained, "y")], validation, filter_overlap=[]) == [(trained, "y")]


def test_overlap_compares_every_character_with_its_other_case_and_forms():
    characters = map(chr, chain(range(0xD800), range(0xE000, sys.maxunicode + 1)))
    forms = ("NFC", "NFD", "NFKC", "NFKD")
    variants = {
        character: {character.upper(), character.lower(), character.casefold(), character.title()}
        | {normalize(form, character) for form in forms}
        for character in characters
    }
    told_apart = [
        character
        for character, others in variants.items()
        if len(others) > 1 and len(set(map(filters._comparable, {character, *others}))) > 1
    ]

    # The capital of Turkish's dotless i is the ordinary I.
    assert told_apart == ["\N{LATIN SMALL LETTER DOTLESS I}"]


def test_overlap_ignores_whether_an_accent_is_a_character_of_its_own():
    validation = as_dataset(("Caf\u00e9", "x"))

    assert dropped_by([("cafe\u0301", "y")], validation, filter_overlap=[])


def test_overlap_keeps_empty_sides_when_an_evaluation_set_has_one():
    validation = as_dataset(("", "x"))

    assert dropped_by([("", "y"), ("z", " ")], validation, filter_overlap=[]) == []


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
def judged(dataset, write):
    """`PAIRS` after all filters."""
    return filtered(dataset, filter_overlap=[write("test.en", "The test.")], **ALL_FILTERS)


def test_kept_pairs_stay_unaltered_and_in_order(judged):
    assert pairs_of(judged.kept) == [PAIRS[place] for place in KEPT]


def test_each_filter_drops_its_own_pair(judged):
    named = [(row, judged.filters[judged.verdicts[row] - 1]) for row, _ in DROPPED]

    assert named == DROPPED
    assert judged.dropped == {name: 1 for _, name in DROPPED}


def test_dropped_file_holds_line_filter_and_text_of_each(judged, tmp_path):
    judged.write_dropped(tmp_path)

    lines = [json.loads(line) for line in read_lines(tmp_path / "dropped.jsonl")]
    assert lines == [
        {"line": row + 1, "filter": name, "source": PAIRS[row][0], "target": PAIRS[row][1]}
        for row, name in DROPPED
    ]


def test_dropped_file_is_there_exactly_when_there_are_filters(dataset, tmp_path):
    filtered(dataset).write_dropped(tmp_path)
    assert not (tmp_path / "dropped.jsonl").exists()

    filtered(dataset, filter_max_characters=1000).write_dropped(tmp_path)
    assert (tmp_path / "dropped.jsonl").read_bytes() == b""


def test_kept_and_dropped_are_what_was_read(tmp_path, monkeypatch):
    # Several batches, the last one shorter.
    monkeypatch.setattr(filters, "_ROWS_AT_A_TIME", 7)
    random = np.random.default_rng(5)
    sides = random.choice(["", "a", "bb", "cccc", "ж", "Test"], size=(100, 2)).tolist()
    read = [
        (f"{source}{number % 3}" * bool(source), target)
        for number, (source, target) in enumerate(sides)
    ]

    result = filtered(
        as_dataset(*read), as_dataset(("Test2", "x")), filter_overlap=[], **ALL_FILTERS
    )

    result.write_dropped(tmp_path)
    dropped = [json.loads(line) for line in read_lines(tmp_path / "dropped.jsonl")]
    assert len(result.kept) > 10
    assert sum(result.dropped.values()) == len(dropped) > 10
    assert Counter(pairs_of(result.kept)) + Counter(
        (line["source"], line["target"]) for line in dropped
    ) == Counter(read)
    assert all(read[line["line"] - 1] == (line["source"], line["target"]) for line in dropped)


def test_kept_pairs_do_not_depend_on_the_order_of_the_filters(dataset, write):
    rules = drop_rules(
        TrainSettings(filter_overlap=[write("test.en", "The test.")], **ALL_FILTERS), None
    )
    backwards = dict(reversed(rules.items()))

    assert pairs_of(filter_pairs(dataset, backwards).kept) == [PAIRS[place] for place in KEPT]


def test_summary_tells_each_filter_and_the_sum(dataset):
    result = filtered(dataset, filter_empty=True, filter_max_characters=13)

    assert [line.split() for line in result.summary()] == [
        ["dropped", "3", "of", "10", "pairs,", "see", "dropped.jsonl"],
        ["1", "empty"],
        ["2", "max_characters"],
    ]


def test_summary_is_empty_when_there_are_no_filters(dataset):
    assert list(filtered(dataset).summary()) == []


def test_filters_that_leave_nothing_are_refused_with_their_counts(dataset):
    with pytest.raises(ValueError, match=r"got all 10 dropped: empty 1, max_characters 9\."):
        filtered(dataset, filter_empty=True, filter_max_characters=1, filter_duplicates=True)


# Mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filter_max_characters": 0}, "--filter_max_characters must be at least 1, got 0."),
        ({"filter_max_ratio": 0.5}, "by the shorter one, got 0.5."),
        ({"filter_max_ratio": float("nan")}, "by the shorter one, got nan."),
        ({"filter_script": ["Latn"]}, "and that of the target, got ['Latn']."),
        ({"filter_script": ["Latn", "Cyrrl"]}, "got 'Cyrrl' in 'Cyrrl'."),
        ({"filter_script": ["Latn+", "Cyrl"]}, "got '' in 'Latn+'."),
        ({"filter_script": ["Latn}", "Cyrl"]}, "got 'Latn}' in 'Latn}'."),
        ({"filter_overlap": []}, "--filter_overlap needs evaluation pairs to compare with"),
    ],
)
def test_setting_that_no_filter_can_follow_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        drop_rules(TrainSettings(**settings), None)


def test_mistakes_are_told_all_at_once():
    settings = TrainSettings(
        filter_max_characters=0,
        filter_max_ratio=0.0,
        filter_script=["Latn"],
        filter_overlap=[],
    )

    with pytest.raises(ValueError, match="--filter_max_characters") as caught:
        drop_rules(settings, None)

    assert len(str(caught.value).splitlines()) == 4


def test_missing_file_of_overlap_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.en"):
        drop_rules(TrainSettings(filter_overlap=[str(tmp_path / "missing.en")]), None)


# In a run


def given_settings(monkeypatch, *options):
    """What `train` gets from the command line."""
    given = []
    monkeypatch.setattr(training, "train", lambda settings, arguments: given.append(settings))
    main(["train", "--train", "a", "b", *options])
    return given[0]


def test_command_line_sets_each_filter(monkeypatch):
    settings = given_settings(
        monkeypatch,
        *("--filter_empty", "--filter_identical", "--filter_duplicates"),
        *("--filter_max_characters", "16", "--filter_max_ratio", "2"),
        *("--filter_script", "Latn", "Latn", "--filter_overlap", "c", "d"),
    )

    assert {name: getattr(settings, name) for name in ALL_FILTERS} == ALL_FILTERS
    assert settings.filter_overlap == ["c", "d"]


def test_command_line_takes_overlap_without_files_and_leaves_it_off(monkeypatch):
    assert given_settings(monkeypatch, "--filter_overlap").filter_overlap == []
    assert given_settings(monkeypatch).filter_overlap is None


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


def test_run_trains_on_what_is_kept_and_records_what_is_dropped(run_settings, tmp_path, capsys):
    settings = TrainSettings(**run_settings)
    folder = tmp_path / "run"

    train(settings, build_arguments(settings, folder))

    dropped = [json.loads(line) for line in read_lines(folder / "dropped.jsonl")]
    assert [(line["line"], line["filter"]) for line in dropped] == [
        (1, "empty"),
        (22, "duplicates"),
    ]
    run = read_json(folder / "run.json")
    assert (run["pairs"], run["dropped_pairs"]) == (20, {"empty": 1, "duplicates": 1})
    printed = capsys.readouterr().out
    assert "dropped     2 of 22 pairs" in printed
    assert "pairs       20," in printed


def test_vocabulary_is_learned_from_kept_pairs_only(run_settings, tmp_path):
    given = {"tokenizer_kind": "word", "filter_max_characters": 6}
    settings = TrainSettings(**run_settings | given)

    train(settings, build_arguments(settings, tmp_path / "run"))

    vocabulary = read_json(tmp_path / "run" / "tokenizer.json")["model"]["vocab"]
    assert "9" in vocabulary
    assert not {"leer", "10"} & vocabulary.keys()


def test_run_compares_with_its_validation_pairs_and_records_their_files(
    run_settings, write, tmp_path
):
    test = write("test.txt", "one 7", "one 8")
    validation = write("validation.jsonl", *records([("eins 5", "one five")]))
    settings = TrainSettings(**run_settings, validation=[validation], filter_overlap=[test])

    train(settings, build_arguments(settings, tmp_path / "run"))

    run = read_json(tmp_path / "run" / "run.json")
    assert run["dropped_pairs"]["overlap"] == 3
    assert run["sha256"].keys() == {"train.jsonl", "validation.jsonl", "test.txt"}


def test_resumed_run_filters_as_before(run_settings, tmp_path):
    folder = tmp_path / "run"
    settings = TrainSettings(**run_settings)
    train(settings, build_arguments(settings, folder))
    before = (folder / "dropped.jsonl").read_bytes()
    (folder / "dropped.jsonl").unlink()

    settings = TrainSettings(**run_settings, resume=True)
    train(settings, build_arguments(settings, folder, num_train_epochs=2))

    assert (folder / "dropped.jsonl").read_bytes() == before
    assert read_json(folder / "run.json")["pairs"] == 20
    assert len(checkpoints_of(folder)) == 2


def test_nothing_is_written_when_a_filter_is_refused(run_settings, tmp_path):
    settings = TrainSettings(**run_settings, filter_script=["Latn", "English"])

    with pytest.raises(ValueError, match="'English'"):
        train(settings, build_arguments(settings, tmp_path / "run"))

    assert not (tmp_path / "run").exists()
