"""What readers see of a text, and of their mistakes."""

import gzip
import math
import re

import pytest

from vanilla_transformer_tools.page import page as pages
from vanilla_transformer_tools.page.fragments import MOST_LINES
from vanilla_transformer_tools.page.page import Page
from vanilla_transformer_tools.page.served_model import Choices

from ..conftest import save_small_model

GREEDY = {"num_beams": 1}


def test_views_show_one_translation(page, model):
    (expected,) = model.translate(["ein hund"], Choices(num_beams=3))

    views = page.view("ein hund", "one", {"num_beams": 3})

    assert views.text == expected.text
    assert views.status.startswith("<p>beam 3, length penalty ")
    assert f"{expected.score:.3f}" in views.hypotheses
    assert f"{math.exp(expected.token_scores[0]):.0%}" in views.tokens
    assert views.tokens.count("<li") == len(expected.tokens)
    assert views.lines == [("1: ein hund", 1)]
    assert views.attention == ""


def test_lines_stay_lines(page):
    views = page.view("ja\n\n nein \n", "", GREEDY)

    assert [bool(line.strip()) for line in views.text.split("\n")] == [True, False, True, False]
    assert views.lines == [("1: ja", 1), ("3:  nein ", 3)]


def test_models_are_told_apart(page):
    one, two, first = (page.view("ein hund", name, GREEDY).text for name in ("one", "two", ""))

    assert first == one != two
    with pytest.raises(ValueError, match="one of one, two, got 'three'"):
        page.model("three")


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_empty_text_gets_a_hint(page, text):
    views = page.view(text, "", {})

    assert "Type or paste a text" in views.status
    assert views._replace(status="") == pages.Views("", "", "", "", "", "", [])


@pytest.mark.parametrize(
    ("text", "choices", "said"),
    [
        ("x" * 100_000, {}, "got 100,000"),
        ("ja", {"num_beams": 99}, "got 99"),
        ("ja", {"do_sample": True, "top_p": 0}, "`top_p` must be above 0"),
        ("ja", {"target_language": "de"}, "takes no target language, got &#x27;de&#x27;"),
    ],
)
def test_mistake_becomes_a_message(page, text, choices, said):
    views = page.view(text, "", choices)

    assert said in views.status
    assert views.text == ""


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\x00\x01\x1b", "😀👩\u200d🔬", "\ud800", "\u202eab", "…"]
)
def test_any_text_has_a_result(page, text):
    views = page.view(text, "", GREEDY)

    assert views.lines
    "".join((*views[:-1], views.lines[0][0])).encode("utf-8")
    assert "<script" not in "".join(views[1:6])


def test_many_lines_are_shown_in_part(page):
    views = page.view("a\n" * (MOST_LINES + 2), "", GREEDY)

    assert views.tokens.count("<ol") == MOST_LINES
    assert ">2 further lines" in views.tokens
    assert len(views.lines) == MOST_LINES + 2


def test_links_that_cannot_be_read_are_a_message(page, model, monkeypatch):
    def fail(*_):
        raise ValueError("no fast tokenizer")

    monkeypatch.setattr(model, "link", fail)

    views = page.view("ja", "one", GREEDY)

    assert "no fast tokenizer" in views.links
    assert views.text


def test_program_gets_numbers(page):
    answer = page.translate("ja\nnein", "one", {"num_hypotheses": 2})

    assert answer["text"] == "\n".join(line["translations"][0]["text"] for line in answer["lines"])
    assert answer["search"].startswith("beam 2")
    first = answer["lines"][0]
    assert first["source"] == "ja"
    scores = [one["score"] for one in first["translations"]]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    assert len(first["tokens"]) == len(first["probabilities"])
    assert all(0 < probability <= 1 for probability in first["probabilities"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((["ja"], "one", 1), r"The text must be a string, got \['ja'\]"),
        (("ja", ["one"], 1), r"one of one, two, got \['one'\]"),
        (("ja", "one", "1"), "between 1 and 1, got '1'"),
    ],
)
def test_values_of_a_wrong_type_are_refused(page, arguments, match):
    with pytest.raises(ValueError, match=match):
        page.attention(*arguments, {})


def test_attention_is_that_of_the_line_asked_for(page):
    assert '"source":"nein"' in page.attention("ja\nnein", "one", 2, GREEDY)
    with pytest.raises(ValueError, match="between 1 and 2, got 3"):
        page.attention("ja\nnein", "one", 3, GREEDY)


def test_comparison_has_both_models_and_their_mean_scores(page, model):
    scores = [one.score for one in model.translate(["ja", "nein"], Choices(num_beams=1))]

    shown = page.compare("ja\n\nnein", ("one", "two"), GREEDY)

    assert re.findall("<h3>(.*?)</h3>", shown) == ["one", "two"]
    assert f"mean score {sum(scores) / 2:.3f}, greedy" in shown
    assert "<mark>" in shown
    with pytest.raises(ValueError, match="Type or paste"):
        page.compare(" ", ("one", "two"), GREEDY)


def test_file_has_one_line_for_each(page, model, tmp_path):
    path = tmp_path / "in.txt"
    lines = ["ja", "", "nein"] * 30
    path.write_text("".join(f"{line}\n" for line in lines))

    *progress, (done, count, made) = page.translate_file(path, "one", GREEDY)

    assert [step[:2] for step in progress] == [(0, 90), (64, 90)]
    assert (done, count) == (90, 90)
    assert made.name == "in.translated.txt"
    assert made.read_text().splitlines() == page.view("\n".join(lines), "one", GREEDY).text.split(
        "\n"
    )
    *_, (_, _, again) = page.translate_file(path, "two", GREEDY)
    assert again != made
    assert again.read_text() != made.read_text()


def test_lines_of_windows_are_translated_as_in_a_text(page, tmp_path):
    texts = []
    for end in (b"\n", b"\r\n"):
        path = tmp_path / "upload.txt"
        path.write_bytes(end.join([b"drei", b"vier", b""]))
        *_, (_, _, made) = page.translate_file(path, "one", GREEDY)
        texts.append(made.read_text())

    assert texts[0] == texts[1]


def test_file_that_is_not_text_is_refused(page, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff")

    with pytest.raises(ValueError, match="must be UTF-8"):
        list(page.translate_file(path, "", GREEDY))


def test_endless_line_of_a_file_is_refused(page, tmp_path):
    path = tmp_path / "in.txt"
    path.write_text(f"ja\n{'x' * 5001}\n")

    with pytest.raises(ValueError, match="at most 5,000 characters here, got 5,001 in line 2"):
        next(page.translate_file(path, "", GREEDY))


def test_small_file_that_unpacks_to_a_large_one_is_refused(page, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "LARGEST_FILE", 100)
    path = tmp_path / "in.gz"
    path.write_bytes(gzip.compress(b"ja\n" * 40))
    assert path.stat().st_size < 100

    with pytest.raises(ValueError, match="must have at most 100 bytes of text, unpacked"):
        next(page.translate_file(path, "", GREEDY))


def test_folders_are_known_by_their_last_name(tmp_path, tokenizer, write):
    folders = [tmp_path / one / "model" for one in "ab"]
    for folder in folders:
        save_small_model(folder, tokenizer)
    names = list(map(str, folders))

    page = Page.load(names[:1], examples=write("lines", "ja"))
    assert list(page.models) == ["model"]
    assert page.examples == {"model": ["ja"]}
    assert list(Page.load(names).models) == names
