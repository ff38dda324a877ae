"""The command `translate` with files: what is written, when, and how an interrupted run goes on."""

import io
import json
import os
import random
import re
import shutil
import sys
from functools import partial

import pytest
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.settings import TranslateSettings
from vanilla_transformer_tools.translation import Translator, job
from vanilla_transformer_tools.translation.job import planned

from ..models import interrupted_after, save_small_model
from ..support.engines import Recorder
from .conftest import LINES, as_bytes

# As line ends stand in text: none of them ends a line but the line feed.
ODD = ["a\u2028b", "c\rd", "e\x0cf", "\x00", "\u2028", "g\r", "\u202e\u05e9\u05dc", "😀😁"]


@pytest.fixture
def run(translate, folder):
    return partial(translate, "--model", folder, "--max_extra_tokens", 5)


def write(path, lines):
    path.write_bytes(as_bytes(lines))
    return path


def test_file_is_translated_as_standard_input_is(run, tmp_path):
    source = write(tmp_path / "in", LINES)

    status, out, _ = run("--input", source, "--output", tmp_path / "out")

    assert (status, out) == (0, b"")
    assert (tmp_path / "out").read_bytes() == run(stdin=source.read_bytes())[1]
    assert run("--input", source)[1] == run(stdin=source.read_bytes())[1]
    assert (tmp_path / "out").read_bytes().count(b"\n") == len(LINES)


def test_translations_go_into_a_pipe(run, tmp_path):
    source = write(tmp_path / "in", LINES)
    reading, writing = os.pipe()

    run("--input", source, "--output", f"/dev/fd/{writing}")

    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == run("--input", source)[1]


def test_blank_ends_stay_and_change_nothing(run):
    ends = ["", " ", "    ", "\t", "\r", "\xa0", "\u3000"]
    rng = random.Random(1)
    bare = [" ".join(rng.choices(["ein", "hund", "rennt", "der"], k=3)) for _ in range(200)]
    # A byte order mark at the beginning of the input is no part of it.
    around = [("\t", " "), *((rng.choice(ends), rng.choice(ends)) for _ in bare[1:])]

    def within(texts):
        pairs = zip(texts, around, strict=True)
        return as_bytes(left + text + right for text, (left, right) in pairs)

    plain = run(stdin=as_bytes(bare))[1].decode().split("\n")[:-1]

    assert run(stdin=within(bare))[1] == within(plain)


def test_sentences_are_translated_alone_and_keep_their_blanks(run):
    line = "ein hund rennt.  der mann schläft.\tja"
    parts = run("ein hund rennt.", "der mann schläft.", "ja")[1].decode().split("\n")

    found = run("--split_sentences", stdin=as_bytes([line]))[1]

    assert found.decode() == "{}  {}\t{}\n{}".format(*parts)
    whole = run("--no-split_sentences", stdin=as_bytes([line]))[1]
    assert whole != found
    assert run(stdin=as_bytes([line]))[1] == whole


@pytest.mark.parametrize(
    ("share", "others", "options"),
    [
        (0.02, {}, ["--split_sentences"]),
        (0.03, {"sources_without_letters": 0.0}, ["--no-split_sentences"]),
        (0.0, {"sources_without_letters": 0.01}, ["--split_sentences", "--copy_without_letters"]),
        (0.0, {"sources_without_letters": 0.02}, ["--split_sentences"]),
    ],
)
def test_record_of_the_training_decides_what_becomes_of_lines(
    run, folder, tmp_path, share, others, options
):
    shutil.copytree(folder, tmp_path / "model")
    record = {"lines_of_several_sentences": share, **others}
    (tmp_path / "model" / "run.json").write_text(json.dumps(record))
    lines = ("--max_extra_tokens", 5, "ein hund rennt. der mann schläft.", "12:30")

    # Without its model, which would make an ensemble of the two.
    translate = run.func

    found = translate("--model", tmp_path / "model", *lines)

    assert found[1] == translate("--model", folder, *options, *lines)[1]
    assert found[1].endswith(b"\n12:30\n") == ("--copy_without_letters" in options)


def test_window_ends_where_the_pipe_pauses(folder, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reading, writing = os.pipe()
    with open(reading, "rb") as source, open(writing, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source))
        with planned(TranslateSettings(model=[str(folder)]), []) as plan:
            pass
        engine = Recorder()
        found = Translator(engine, tokenizer).translate(plan.lines, has_next=plan.has_next)

        pipe.write(b"ja\nnein\n")
        next(found)
        assert len(engine.sources) == 2
        next(found)
        pipe.write(b"x\n")
        next(found)
        assert len(engine.sources) == 3


def test_closed_standard_input_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)

    with (
        pytest.raises(ValueError, match="Standard input is closed"),
        planned(TranslateSettings(), []),
    ):
        pass


def test_input_that_is_cut_while_it_is_read_ends_with_an_error(run, tmp_path, monkeypatch):
    source = write(tmp_path / "in", LINES)
    count = job.file_lines

    def cut_after_counting(path):
        yield from count(path)
        write(source, LINES[:3])

    monkeypatch.setattr(job, "file_lines", cut_after_counting)

    status, _, err = run("--input", source, "--output", tmp_path / "out")

    assert status == 2
    assert f"got 3 lines instead of the {len(LINES)} at the beginning" in err
    assert (tmp_path / "out.job.json").exists()


# Going on


@pytest.mark.parametrize(
    ("share", "options"),
    [
        (0.01, ["--details"]),
        (0.77, ["--num_beams", "2", "--n_best", "2"]),
        (1.0, ["--num_beams", "2", "--n_best", "2"]),
    ],
)
def test_run_that_was_cut_off_anywhere_goes_on_to_the_same_result(run, tmp_path, share, options):
    source, out = write(tmp_path / "in", LINES), tmp_path / "out"
    with interrupted_after(len(LINES)):
        run("--input", source, "--output", out, *options)
    whole = out.read_bytes()
    out.write_bytes(whole[: int(share * len(whole))])

    status, _, _ = run("--input", source, "--output", out, "--resume", *options)

    assert status == 0
    assert out.read_bytes() == whole


def test_run_goes_on_behind_what_is_there_and_does_not_do_it_again(run, tmp_path):
    source, done = write(tmp_path / "in", LINES), tmp_path / "out"
    with interrupted_after(2):
        run("--input", source, "--output", done)
    # The last line was not finished, and is longer than all that follows.
    done.write_text("mine\nmine too\n" + 999 * "half ")

    run("--input", source, "--output", done, "--resume")

    expected = run("--input", source)[1].split(b"\n")
    assert done.read_bytes().split(b"\n") == [b"mine", b"mine too", *expected[2:]]


def test_resume_refuses_an_output_with_more_lines_than_the_input(run, tmp_path):
    source, out = write(tmp_path / "in", ["ja", "nein"]), tmp_path / "out"
    with interrupted_after(1):
        run("--input", source, "--output", out)
    out.write_bytes(b"a\nb\nc\n")

    status, _, err = run("--input", source, "--output", out, "--resume")

    assert status == 2
    assert "3 lines in it instead of at most 2" in err
    assert out.read_bytes() == b"a\nb\nc\n"


# What is written


def test_n_best_gives_rows_of_number_score_and_text(run):
    _, out, _ = run("--num_beams", 3, "--n_best", 3, stdin=as_bytes(LINES))
    best = run("--num_beams", 3, "--scores", stdin=as_bytes(LINES))[1].decode().split("\n")[:-1]

    rows = [row.split("\t", 2) for row in out.decode().split("\n")[:-1]]

    assert [int(number) for number, _, _ in rows] == [n for n in range(1, 8) for _ in range(3)]
    assert rows[::3] == [row.split("\t", 2) for row in best]
    scores = [float(score) for _, score, _ in rows]
    assert all(
        scores[row : row + 3] == sorted(scores[row : row + 3])[::-1] for row in range(0, 21, 3)
    )
    assert [rows[6], rows[12]] == [["3", "0.0000", ""], ["5", "0.0000", " "]]


def test_details_tell_tokens_scores_and_alignment(run, tokenizer):
    options = ["--num_beams", 2, "--n_best", 2, "--length_penalty", 1.0]
    _, out, _ = run("--details", *options, "ein hund", "")

    first, blank = map(json.loads, out.decode().split("\n")[:-1])

    source = tokenizer.convert_ids_to_tokens(tokenizer("ein hund")["input_ids"])
    assert (first["line"], blank["line"]) == (1, 2)
    for hypothesis in first["hypotheses"]:
        tokens, scores = hypothesis["tokens"], hypothesis["token_scores"]
        assert hypothesis["source_tokens"] == source
        assert hypothesis["score"] == pytest.approx(sum(scores) / len(scores), abs=1e-3)
        words = len(tokens) - (not hypothesis["reached_limit"])
        targets = [pair.split("-")[1] for pair in hypothesis["alignment"].split()]
        assert targets == list(map(str, range(words)))
    assert blank["hypotheses"][0]["tokens"] == []


def test_prefix_begins_each_translation(run, tmp_path):
    prefixes = write(tmp_path / "prefixes", ["der", "", "die ", "x"])
    lines = as_bytes(["ja", "nein", "ja", " "])

    of_all = run("--prefix", "der alte", stdin=lines)[1].decode().split("\n")
    of_each = run("--prefix_file", prefixes, stdin=lines)[1].decode().split("\n")
    none = run(stdin=lines)[1].decode().split("\n")

    assert all(text.startswith("der alte") for text in of_all[:3])
    assert of_each[0].startswith("der")
    assert of_each[2].startswith("die")
    assert (of_each[1], of_each[3], of_all[3]) == (none[1], " ", " ")


def test_shards_in_order_are_the_translation_of_the_input(run, tmp_path):
    source = write(tmp_path / "in", LINES)
    prefixes = write(tmp_path / "prefixes", list("abcdefg"))
    options = ["--input", source, "--prefix_file", prefixes, "--num_beams", 2, "--n_best", 2]

    parts = [run(*options, "--shard", f"{number}/3")[1] for number in (1, 2, 3)]

    assert b"".join(parts) == run(*options)[1]
    assert [part.count(b"\n") for part in parts] == [4, 4, 6]
    status, _, err = run("--input", source, "--shard", "4/3")
    assert status == 2
    assert "--shard must be NUMBER/OF, such as 3/64, with a number from 1 to OF, got '4/3'" in err


def test_tabs_in_rows_with_columns_are_blanks(run, tmp_path):
    write(tmp_path / "prefixes", ["a\tb", "c"])
    options = ["--prefix_file", tmp_path / "prefixes", "ja\t", "nein"]

    rows = run("--scores", *options)[1].decode().split("\n")[:-1]

    assert [row.count("\t") for row in rows] == [2, 2]
    assert rows[0].split("\t")[2].startswith("a b")
    assert run(*options)[1].startswith(b"a\tb")


def test_lines_of_a_tagged_file_are_translated_into_the_language_of_each(run, tmp_path):
    translate = run.func
    tokenizer = VanillaTransformerTokenizer.train(
        LINES * 3, vocab_size=320, target_languages=["de", "en"]
    )
    folder = save_small_model(tmp_path / "model", tokenizer)
    options = ["--model", folder, "--max_extra_tokens", 5]
    lines = ["ja", "nein", "oh nein!", "", "x"]
    tags = ["en", "de", "en", "de", "de"]
    rows = [f"{line}\t-\t{tag}" for line, tag in zip(lines, tags, strict=True)]

    status, out, _ = translate(*options, "--tag_column", 3, stdin=as_bytes(rows))

    into = {
        tag: translate(*options, "--target_language", tag, stdin=as_bytes(lines))[1].split(b"\n")
        for tag in ("de", "en")
    }
    assert status == 0
    assert out.split(b"\n")[:-1] == [into[tag][place] for place, tag in enumerate(tags)]
    assert into["de"] != into["en"]
    options += ["--tag_column", 3]
    assert translate(*options, "--output", tmp_path / "empty") == (0, b"", "")
    assert (tmp_path / "empty").read_bytes() == b""
    err = translate(*options, "--max_source_length", 3, stdin=as_bytes(rows))[2]
    longer = [n for n, line in enumerate(lines, 1) if len(tokenizer(line).input_ids) > 2]
    assert sorted(map(int, re.findall(r"Line (\d) is longer", err))) == longer
    status, out, err = translate(*options, stdin=as_bytes([*rows[:2], "x\ty"]))
    assert (status, out.count(b"\n")) == (2, 2)
    assert "Line 3 must have a target language in column 3, its --tag_column, got 'x\\ty'" in err


# Odd text


def test_odd_characters_neither_end_nor_merge_lines(run, tmp_path):
    source = write(tmp_path / "in", ODD)

    out = run("--input", source)[1]

    rows = out.decode().split("\n")
    assert len(rows) == len(ODD) + 1
    assert rows[4] == "\u2028"
    alone = [run(stdin=as_bytes([line]))[1].decode() for line in ODD]
    assert out.decode() == "".join(alone)


def test_line_separators_in_translations_are_written_as_blanks_and_counted(run, tmp_path):
    # Forced, as nothing else makes this model write them.
    texts = ["a\u2028b\rc", "d\x85e", "f\x0b\x0c\x1c\x1d\x1e\u2029g", "h i"]
    write(tmp_path / "prefixes", texts)
    lines = as_bytes(["ja"] * 4)

    _, out, err = run("--prefix_file", tmp_path / "prefixes", stdin=lines)

    rows = out.decode().split("\n")[:-1]
    assert [len(row.splitlines()) for row in rows] == [1] * 4
    assert [row[:5] for row in rows[:2]] == ["a b c", "d e" + rows[1][3:5]]
    assert rows[2].startswith("f" + 6 * " " + "g")
    count = int(err.split(" line separators")[0].split("\n")[-1])
    assert count >= 9
    assert "translations were cut off at the length limit, --max_extra_tokens" in err
