"""What readers and programs get for a text or a file, and for their mistakes."""

import gzip

import pytest

from vanilla_transformer_tools.page import page as pages
from vanilla_transformer_tools.page.page import MOST_CHARACTERS, Page, lines_of

from ..models import save_small_model

GREEDY = {"num_beams": 1}


def test_lines_end_where_the_keyboard_ends_them():
    assert lines_of("a\r\nb\n\nc\x0bd\u2028e") == ["a", "b", "", "c\x0bd\u2028e"]
    assert lines_of("\ud800 \U0001f600") == ["\ufffd \U0001f600"]
    assert lines_of("x" * MOST_CHARACTERS)


def test_models_are_told_apart(page):
    one, two, first = (page.translate("ein hund", name, GREEDY) for name in ("one", "two", ""))

    assert first == one != two


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("x" * 100_000, "", 1, {}), r"at most 5,000 characters here, got 100,000\."),
        ((["ja"], "one", 1, {}), r"The text must be a string, got \['ja'\]"),
        (("ja", ["one"], 1, {}), r"one of one, two, got \['one'\]"),
        (("ja", "three", 1, {}), "one of one, two, got 'three'"),
        (("ja", "one", "1", {}), "between 1 and 1, got '1'"),
        (("ja\nnein", "one", 3, {}), "between 1 and 2, got 3"),
        (("ja", "one", 1, {"do_sample": True, "top_p": 0}), "`top_p` must be above 0"),
        (("ja", "one", 1, {"target_language": "de"}), "takes no target language, got 'de'"),
    ],
)
def test_mistake_is_named(page, arguments, match):
    with pytest.raises(ValueError, match=match):
        page.attention(*arguments)


def test_any_text_has_a_result(page):
    for text in ("", " \n\t", "\x00\x01\x1b", "😀👩\u200d🔬", "\ud800"):
        str(page.translate(text, "", GREEDY)).encode("utf-8")
    assert '"source":"nein"' in page.attention("ja\nnein", "one", 2, GREEDY)


def test_program_gets_numbers(page):
    answer = page.translate("ja\n\nnein", "one", {"num_hypotheses": 2})

    assert answer["text"] == "\n".join(line["translations"][0]["text"] for line in answer["lines"])
    assert answer["search"].startswith("beam 2")
    assert [line["source"] for line in answer["lines"]] == ["ja", "", "nein"]
    first = answer["lines"][0]
    scores = [each["score"] for each in first["translations"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert len(first["tokens"]) == len(first["probabilities"])
    assert all(0 < probability <= 1 for probability in first["probabilities"])
    assert "".join(word for word, _ in first["links"]) == first["translations"][0]["text"].replace(
        " ", ""
    )


def test_file_has_one_line_for_each(page, tmp_path):
    path = tmp_path / "in.txt"
    lines = ["ja", "", "nein"] * 30
    # They may end as on Windows.
    path.write_bytes("".join(f"{line}\r\n" for line in lines).encode())

    *progress, (done, count, made) = page.translate_file(path, "one", GREEDY)

    assert [step[:2] for step in progress] == [(0, 90), (64, 90)]
    assert (done, count, made.name) == (90, 90, "in.translated.txt")
    assert made.read_text() == page.translate("\n".join(lines), "one", GREEDY)["text"] + "\n"
    *_, (_, _, again) = page.translate_file(path, "two", GREEDY)
    assert again != made
    assert again.read_text() != made.read_text()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("picture.png", b"\x89PNG\xff", "^'picture.png' must be UTF-8"),
        ("in.txt", b"ja\n" + b"x" * 5001, "at most 5,000 characters here, got 5,001 in line 2"),
        (
            "in.gz",
            gzip.compress(b"ja\n" * 9000),
            "must have at most 20,000 bytes of text, unpacked",
        ),
    ],
    ids=["binary", "long line", "large"],
)
def test_file_that_cannot_be_translated_is_refused(
    page, tmp_path, monkeypatch, name, content, match
):
    monkeypatch.setattr(pages, "LARGEST_FILE", 20_000)
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ValueError, match=match):
        next(page.translate_file(path, "", GREEDY))


def test_folders_are_known_by_their_last_name(tmp_path, tokenizer, write):
    folders = [tmp_path / name / "model" for name in "ab"]
    for folder in folders:
        save_small_model(folder, tokenizer)
    names = list(map(str, folders))

    page = Page.load(names[:1], examples=write("lines", "ja"))
    assert list(page.models) == ["model"]
    assert page.examples == {"model": ["ja"]}
    assert list(Page.load(names).models) == names
