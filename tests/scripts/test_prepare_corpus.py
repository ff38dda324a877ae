"""The script that turns files of public corpora into pairs."""

import json
from functools import partial

import pytest

from ..support.documents import ROOT
from ..support.scripts import run_script

prepare = partial(run_script, ROOT / "scripts" / "prepare_corpus.py")


def read_pairs(path):
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["source"], row["target"]) for row in rows]


def test_spelling_has_a_blank_between_its_letters(tmp_path):
    (tmp_path / "words.tsv").write_text("a lịch\th o a ˧˧\n", encoding="utf-8")

    done = prepare("g2p", tmp_path / "words.tsv", "--folder", tmp_path, "--split", "train")

    assert done.returncode == 0, done.stderr
    assert read_pairs(tmp_path / "train.jsonl") == [("a _ l ị c h", "h o a ˧˧")]
    assert not (tmp_path / "validation.jsonl").exists()


def test_carving_keeps_every_pair_and_the_sources_apart(tmp_path):
    pairs = [(f"source {number % 600}", f"target {number}") for number in range(1000)]
    for side, name in enumerate(("a", "b")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs))
    folders = [tmp_path / seed for seed in ("0", "0_again", "1")]

    for folder in folders:
        given = ["--folder", folder, "--split", "train", "--carve", "0.2"]
        prepare("pairs", tmp_path / "a", tmp_path / "b", *given, "--seed", folder.name[0])

    train, validation = (read_pairs(folders[0] / f"{s}.jsonl") for s in ("train", "validation"))
    assert sorted(train + validation) == sorted(pairs)
    assert not {source for source, _ in train} & {source for source, _ in validation}
    assert len(validation) == pytest.approx(200, rel=0.3)
    first, again, other = (read_pairs(folder / "validation.jsonl") for folder in folders)
    assert first == again != other


def test_sources_of_other_files_are_left_out(tmp_path):
    (tmp_path / "train.tsv").write_text("int a;\tInt32 a;\nint b;\tInt32 b;\n")
    (tmp_path / "valid.tsv").write_text("int c;\tInt32 c;\nint a;\tint a;\nInt b;\tint b;\n")
    prepare("pairs", tmp_path / "train.tsv", "--folder", tmp_path, "--split", "train")

    given = ["--folder", tmp_path, "--split", "unseen", "--unseen_in", tmp_path / "train.jsonl"]
    done = prepare("pairs", tmp_path / "valid.tsv", *given)

    assert read_pairs(tmp_path / "unseen.jsonl") == [("int c;", "Int32 c;"), ("Int b;", "int b;")]
    assert "left out\t1 pairs" in done.stdout


@pytest.mark.parametrize(
    ("kind", "text", "options", "message"),
    [
        ("scan", "IN: walk\n", [], "Line 1 of"),
        ("g2p", "walk\n", [], "Line 1 of"),
        ("pairs", "a\tb\n", ["--carve", "0.001"], "needs at least one pair, got none: 0 were left"),
    ],
)
def test_corpus_without_pairs_is_refused(tmp_path, kind, text, options, message):
    (tmp_path / "in.tsv").write_text(text)
    given = ["--folder", "out", "--split", "train", *options]

    done = prepare(kind, "in.tsv", *given, cwd=tmp_path)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["pairs", "train.jsonl", "--split", "train"], "train.jsonl is an input, and would be"),
        (["pairs", "a.tsv", "--split", "validation", "--carve", "0.5"], "got --split validation"),
        (["scan", "a.tsv", "train.jsonl", "--split", "b"], "one file, got 2: a.tsv, train.jsonl"),
    ],
)
def test_options_that_do_not_go_together_write_nothing(tmp_path, given, message):
    here = tmp_path / "here"
    here.mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (here / name).write_text('{"source": "a", "target": "b"}\n')
    (here / "a.tsv").write_text("IN: a OUT: a\tb\n")
    before = {path: path.read_text() for path in here.iterdir()}
    folder = [] if "--folder" in given else ["--folder", "."]

    done = prepare(*given, *folder, cwd=here)

    assert done.returncode == 2
    assert message in done.stderr
    assert {path: path.read_text() for path in here.iterdir()} == before
