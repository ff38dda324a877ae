"""Which outputs of a teacher a student learns from."""

import json

import pytest

from vanilla_transformer.data.parallel_text import ParallelText, read_pairs
from vanilla_transformer.training.distillation import (
    Targets,
    choose_targets,
    read_outputs,
    write_pairs,
)


@pytest.mark.parametrize(
    ("outputs", "with_reference", "expected"),
    [
        (["b", "c"], False, ["b", "c"]),
        (["b", "c"], True, ["a", "b", "c"]),
        (["b", "b", "a"], True, ["a", "b"]),
        (["b", "a", "b"], False, ["b", "a"]),
        ([" ", "c", ""], False, ["c"]),
        (["", " "], False, []),
        (["", " "], True, ["a"]),
    ],
)
def test_targets_are_written_outputs_each_once(outputs, with_reference, expected):
    chosen = choose_targets("a", outputs, with_reference=with_reference, metric=None)

    assert chosen == expected


# chrF counts parts of words, BLEU whole words only.
@pytest.mark.parametrize(
    ("nearest", "expected"),
    [("chrf", "houses that stood therein"), ("bleu", "a house there")],
)
def test_nearest_output_depends_on_the_score(nearest, expected):
    outputs = ["the sun", "houses that stood therein", "a house there"]
    metric = Targets(nearest=nearest).metric()

    chosen = choose_targets("a house stood there", outputs, with_reference=False, metric=metric)

    assert chosen == [expected]


def test_first_of_equally_near_outputs_is_chosen():
    metric = Targets(nearest="chrf").metric()

    chosen = choose_targets("zz", ["", "aa", "bb"], with_reference=True, metric=metric)

    assert chosen == ["zz", "aa"]


def test_bleu_separates_tokens_as_told():
    outputs = ["ab cd!", "x cd !"]

    chosen = [
        choose_targets("ab cd !", outputs, with_reference=False, metric=targets.metric())
        for targets in (Targets(nearest="bleu"), Targets(nearest="bleu", tokenize="none"))
    ]

    assert chosen == [["ab cd!"], ["x cd !"]]


def test_outputs_are_read_in_groups(write):
    rows = ["1\t-0.5\ta\tb", "1\t-1.0\tc", "2\t-0.1\t", "2\t-0.2\td"]

    assert list(read_outputs(write("outputs", *rows), 2)) == [["a\tb", "c"], ["", "d"]]
    assert list(read_outputs(write("outputs", "a\tb", ""), 1)) == [["a\tb"], [""]]


@pytest.fixture
def write_some(write, tmp_path):
    """Writes the pairs of these outputs for two sources; gives path and counts."""

    def write_some_pairs(*outputs, **targets):
        sources, references = write("sources", "s", "ß\tt"), write("references", "a", "b")
        path = tmp_path / "pairs.jsonl"
        return path, write_pairs(path, sources, references, iter(outputs), Targets(**targets))

    return write_some_pairs


def test_pairs_are_read_as_they_were_written(write_some):
    path, taught = write_some(["a", "x"], ["y\tz", " "], references=True)

    pairs = [("s", "a"), ("s", "x"), ("ß\tt", "b"), ("ß\tt", "y\tz")]
    assert list(read_pairs(ParallelText((str(path),)))) == pairs
    assert (taught.sources, taught.blank, taught.equal, taught.pairs) == (2, 0, 1, 4)


def test_source_without_an_output_is_counted_and_left_out(write_some):
    path, taught = write_some([" ", ""], ["b", "c"])

    assert [json.loads(line)["target"] for line in path.read_text("utf-8").splitlines()] == [
        "b",
        "c",
    ]
    assert str(taught) == (
        "2 pairs from 2 sources; the teacher wrote nothing for 1, and the reference for 1"
    )


def test_outputs_of_other_sources_are_refused(write_some):
    with pytest.raises(ValueError, match="shorter"):
        write_some(["a"])


def test_teacher_must_write_something(write_some):
    with pytest.raises(ValueError, match="at least one source, got 2 blank outputs beside"):
        write_some([""], [" "])
