"""HTML: what it says, and that no text becomes part of it."""

import re
from html.parser import HTMLParser

import pytest

from vanilla_transformer_tools.page import fragments
from vanilla_transformer_tools.page.links import LinkedPair
from vanilla_transformer_tools.translation import Translation

EVIL = "<script>alert(1)</script>\"'& ${1} {{x}} @children \x00\x1b[1m\u202e👩\u200d🔬"


class Reader(HTMLParser):
    """Elements of a document and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]


def test_no_text_becomes_markup():
    one = Translation(EVIL, score=-1.0, alternatives=(Translation(EVIL, score=-2.0),))
    pair = LinkedPair((EVIL, "b"), (EVIL,), ((0, 0),))
    for page in (
        fragments.text(EVIL),
        fragments.message(EVIL),
        fragments.hypotheses_table([("x", one)]),
        fragments.token_lines([([EVIL], [0.3])]),
        fragments.alignment([pair]),
        fragments.comparison((EVIL, "b"), (EVIL, "b"), (EVIL, "b")),
        fragments.attention_frame(EVIL),
    ):
        assert "<script" not in page
        assert "'&" not in page
        reader = Reader(page)
        assert {name for _, attributes in reader.elements for name in attributes} <= {
            *("aria-label", "class", "data-links", "dir", "sandbox", "scope", "srcdoc", "style"),
            *("tabindex", "title"),
        }
    assert Reader(fragments.message(EVIL)).text == EVIL


def test_control_characters_are_seen():
    assert Reader(fragments.text("a\x00\x1bb\tc\n")).text == "a\\x00\\x1bb\tc\n"


def test_table_has_all_translations_in_order():
    lines = [
        ("a", Translation("A", score=-0.5, alternatives=(Translation("B", True, score=-1.25),))),
        (" ", Translation(" ", score=0.0)),
        ("c", Translation("C", score=-2.0)),
    ]

    rows = re.findall("<tr>(.*?)</tr>", fragments.hypotheses_table(lines))

    assert [re.findall(">([^<>]+)<", row) for row in rows] == [
        ["line", "rank", "score", "translation"],
        ["1", "1", "-0.500", "A"],
        ["1", "2", "-1.250", "B", " (cut off)"],
        ["3", "1", "-2.000", "C"],
    ]


def test_doubtful_tokens_are_marked():
    page = fragments.token_lines([(["a", "b", "c"], [0.5, 0.496, 0.04])], omitted=3)

    items = Reader(page).all("li")
    assert [item.get("class") for item in items] == [None, "vt-doubtful", "vt-doubtful"]
    assert [item["style"] for item in items] == ["--doubt:0.50", "--doubt:0.50", "--doubt:0.96"]
    assert re.findall("<small>(.*?)</small>", page) == ["50%", "50%", "4%"]
    assert "3 further lines" in page
    assert "further" not in fragments.token_lines([(["a"], [1.0])])


def test_links_are_told_from_both_sides():
    page = fragments.alignment([LinkedPair(("ein", "hund"), ("a", "dog"), ((0, 0), (1, 0)))])

    assert [(item["aria-label"], item["data-links"]) for item in Reader(page).all("li")] == [
        ("ein, to a", "0"),
        ("hund, to a", "0"),
        ("a, from ein, hund", "0 1"),
        ("dog, from nothing", ""),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "ltr"),
        ("أنا a", "rtl"),
        ("1 שלום", "rtl"),
        ("中文", "ltr"),
        ("", "ltr"),
        ("3!", "ltr"),
    ],
)
def test_direction_is_that_of_the_first_letter(text, expected):
    assert fragments.direction(text) == expected


def marked(page):
    return re.findall("<mark>(.*?)</mark>", page)


def test_what_only_one_text_has_is_marked():
    one, other = fragments.differences("the old man\nyes", "the man\nno\nso")

    assert marked(one) == ["old ", "yes"]
    assert marked(other) == ["no", "so"]
    assert one.count("<p") == other.count("<p") == 3


@pytest.mark.parametrize("before", ["", "GPU"])
def test_scripts_without_blanks_are_compared_by_characters(before):
    one, other = fragments.differences(f"{before}我喜欢狗", f"{before}我喜欢猫")

    assert (marked(one), marked(other)) == (["狗"], ["猫"])


def test_comparison_says_whether_texts_differ():
    names, notes = ("one", "two"), ("score 1", "score 2")
    same = fragments.comparison(names, ("a", "a"), notes)
    other = fragments.comparison(names, ("a", "b"), notes)

    assert "same translation" in same
    assert marked(same) == []
    assert "same translation" not in other
    assert re.findall("<h3>(.*?)</h3>.*?<mark>(.*?)</mark>.*?(score .)", other) == [
        ("one", "a", "score 1"),
        ("two", "b", "score 2"),
    ]


def test_page_of_attention_is_framed_without_rights():
    (frame,) = Reader(fragments.attention_frame('<b title="x">')).all("iframe")

    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"] == '<b title="x">'


def test_progress_tells_lines():
    page = fragments.progress(64, 2000)

    (bar,) = Reader(page).all("progress")
    assert (bar["value"], bar["max"]) == ("64", "2000")
    assert "64 of 2,000 lines" in page
