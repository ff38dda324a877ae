"""HTML: what is text, where tags go, and what stays as it is."""

import random
import re
from html.parser import HTMLParser

import pytest

from number_words import english, german
from vanilla_transformer_tools.translation import Translation, Translator, marks
from vanilla_transformer_tools.translation.markup import split_html

from ..support.aligned_numbers import NUMBERS

INLINE = ("b", "i", "em", "a", "span", "code", "u")


class Outline(HTMLParser):
    """The elements of a fragment with the words in each, and whether all are closed in order."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.is_balanced = True
        self.words: dict[str, list[str]] = {}
        self.text = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(fragment)
        self.close()
        self.is_balanced &= not self._open

    def handle_starttag(self, tag, attrs):
        self._open.append((tag, dict(attrs).get("id")))
        self.words.setdefault(self._open[-1][1], [])

    def handle_endtag(self, tag):
        self.is_balanced &= bool(self._open) and self._open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        for _, name in self._open:
            if name is not None:
                self.words[name] += data.split()


def draw_fragment(rng: random.Random) -> tuple[str, dict[str, list[str]], int]:
    """A fragment, the words of the translation that belong in its inline tags, and its numbers.

    Inline tags have an `id`; the order of words in a tag does not matter.
    """
    expected: dict[str, list[str]] = {}
    count = 0

    def words(number: int, depth: int = 0) -> tuple[list[str], list[str]]:
        """Parts of a line, and the words of the translation."""
        nonlocal count
        parts, translated = [], []
        while number > 0:
            if number > 1 and depth < 2 and rng.random() < 0.4:
                size = rng.randint(1, min(2, number))
                inner, of_inner = words(size, depth + 1)
                tag, name = rng.choice(INLINE), f"{len(expected)}"
                expected[name] = of_inner
                href = ' href="?a=1&amp;b=2"' if tag == "a" else ""
                parts.append(f'<{tag} id="{name}"{href}>{" ".join(inner)}</{tag}>')
                number, translated = number - size, translated + of_inner
            else:
                one = rng.choice(NUMBERS)
                shown = german(one)
                if rng.random() < 0.2:
                    shown = shown.replace("ü", "&uuml;").replace("s", "&#115;")
                parts.append(shown)
                translated.append(english(one))
                number, count = number - 1, count + 1
        return parts, translated

    lines = (" ".join(words(rng.randint(1, 4))[0]) for _ in range(2))
    return "\n".join(f"<p>{line}</p>" for line in lines), expected, count


ENGLISH = {german(number): english(number) for number in range(100)}


def reverse(text):
    """The translation of number words, which runs backwards; other words stay as they are."""
    return " ".join(ENGLISH.get(word, word) for word in reversed(text.split()))


def word_links(source, target, noise=0.0, rng=None):
    """Hand-made alignment of `reverse`; some words may be linked to any other one."""
    words = [found.span() for found in re.finditer(r"\S+", source)]
    written = [found.span() for found in re.finditer(r"\S+", target)]
    return [
        (*(rng.choice(words) if noise and rng.random() < noise else true), *place)
        for true, place in zip(reversed(words), written, strict=True)
    ]


@pytest.fixture
def perfect(build, monkeypatch):
    """A Translator of number words that makes no mistake; a share of its links is wrong."""
    rng, wrong = random.Random(5), [0.0]

    def translate(self, batch):
        ends = [marks.blank_ends(piece.text) for piece in batch]
        return [
            Translation(before + reverse(piece.text) + after)
            for piece, (before, after) in zip(batch, ends, strict=True)
        ]

    def links(pairs, *_):
        return [word_links(*pair, wrong[0], rng) for pair in pairs]

    monkeypatch.setattr(Translator, "_translate_batch", translate)
    monkeypatch.setattr(marks, "character_links", links)

    def build_perfect(noise=0.0, **settings):
        wrong[0] = noise
        return build(**{"markup": "html", "max_source_length": 200, **settings})

    return build_perfect


def translate(translator, *fragments):
    return [one.text for one in translator.translate(fragments)]


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.05, 0.9)])
def test_tags_follow_their_words_in_200_fragments(perfect, noise, least):
    rng = random.Random(3)
    drawn = [draw_fragment(rng) for _ in range(200)]
    translator = perfect(noise)

    outlines = [Outline(text) for text in translate(translator, *(one for one, _, _ in drawn))]

    assert all(outline.is_balanced for outline in outlines)
    right = [
        sorted(outline.words[name]) == sorted(words)
        for outline, (_, expected, _) in zip(outlines, drawn, strict=True)
        for name, words in expected.items()
    ]
    assert len(right) > 200
    assert sum(right) / len(right) >= least
    known = {english(number) for number in NUMBERS}
    for outline, (_, _, count) in zip(outlines, drawn, strict=True):
        words = outline.text.split()
        # All text is translated, and there is no other text.
        assert len(words) == count
        assert known.issuperset(words)


EXAMPLES = {
    "inline": ("zwei <b>drei</b> vier", "four <b>three</b> two"),
    "attributes": ("<a href='?a=1&b' ID=x>zwei</a> drei", "three <a href='?a=1&b' ID=x>two</a>"),
    "nested": ("<b>zwei <i>drei</i></b> vier", "four <b><i>three</i> two</b>"),
    "entities": ("zw&#101;i &lt;b&gt; f&uuml;nf AT&T", "AT&amp;T five &lt;b&gt; two"),
    "no-break space": ("<p>&nbsp;zwei</p>", "<p>\xa0two</p>"),
    "lines of blocks": ("<p>zwei drei<br>vier f&uuml;nf", "<p>three two<br>five four</p>"),
    "inline around blocks": ("<b>zwei drei<p>vier</p></b>", "<b>three two<p>four</p></b>"),
    "crossed tags": ("<b>zwei <i>drei</b> vier</i>", "four <b><i>three</i> two</b>"),
    "end without start": ("zwei</i> drei</p>", "three two"),
    "optional ends": ("<ul><li>zwei<li>drei</ul>", "<ul><li>two</li><li>three</li></ul>"),
    "comment": ("zwei <!-- vier <b> --> drei", "<!-- vier <b> -->three two"),
    "comment without end": ("zwei drei <!-- vier", "three two <!-- vier"),
    "tag without end": ("zwei drei <a href='x", "three two <a href='x"),
    "script": ("zwei <script>if (1<2) 'vier'</script> drei", None),
    "script without end": ("<script>vier", "<script>vier</script>"),
    "style": ("<style>p { vier }</style><p>zwei</p>", "<style>p { vier }</style><p>two</p>"),
    "closed at once": ("<b>zwei drei<b/> vier</b> elf", "eleven <b>four three<b/> two</b>"),
    "void": ("zwei <img src='vier.png'> drei", "<img src='vier.png'>three two"),
    "not translated": (
        "zwei <span translate='no'>vier <b>f&uuml;nf</b></span> drei",
        "three <span translate='no'>vier <b>f&uuml;nf</b></span> two",
    ),
    "block that is not translated": (
        "<div translate=no>vier f&uuml;nf</div>zwei",
        "<div translate=no>vier f&uuml;nf</div>two",
    ),
    "white space": ("<p>\n  zwei\n  drei\n</p>", "<p> three two </p>"),
    "preformatted": ("<pre>zwei  drei\n\n vier</pre>", "<pre>three two\n\n four</pre>"),
    "punctuation": ("<b>(zwei)</b> drei", "drei <b>(zwei)</b>"),
    "no text": ("<p><b></b> - <br></p>", "<p><b></b> - <br></p>"),
    "empty": ("", ""),
}


@pytest.mark.parametrize(("fragment", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_fragment_is_translated_in_its_tags(perfect, fragment, expected):
    (text,) = translate(perfect(), fragment)

    if expected is None:
        # Wherever it goes, it is as it was.
        assert re.sub("two|three", "", text).strip() == re.sub("zwei|drei", "", fragment).strip()
    elif "(" in fragment:
        assert text == expected.replace("drei", "three")
    else:
        assert text == expected


def test_items_that_stay_are_written_as_html(perfect):
    translator = perfect(protect="urls")

    (text,) = translate(translator, "zwei https://a.b/?x=1&amp;y=2 drei")

    assert text == "three https://a.b/?x=1&amp;y=2 two"


def test_sentences_of_a_line_are_cut_in_spite_of_tags(perfect):
    translator = perfect(split_sentences=True)

    (text,) = translate(translator, "<p><b>eins zwei. Drei</b> vier. Elf <i>drei</i></p>")

    assert text == "<p><b>zwei. one</b> vier. <b>Drei</b> <i>three</i> Elf</p>"


def test_split_and_join_are_inverse():
    fragment = "<P>eins <B>zwei</B>\t<!----><br/>&nbsp;</P><custom-x a='>'>drei</custom-x> "

    lines, join = split_html(fragment)

    assert len(lines) == 2
    assert join(list(map(str, lines))) == fragment.replace("\t", " ")


def test_too_deep_fragment_is_refused_after_those_before_it(perfect):
    translations = perfect().translate(["zwei", "<b>" * 200])

    assert next(translations).text == "two"
    with pytest.raises(ValueError, match=r"Line 2: .* at most 100 deep"):
        next(translations)


def test_pieces_that_were_cut_are_translated_as_their_line_is(perfect):
    translator = perfect(split_sentences=True, protect="placeholders")
    lines, join = split_html("<p>eins <b>zwei. Drei</b> {x}. Elf {x}</p>")

    (pieces,) = translator.cut(lines)

    assert "".join(map(str, pieces)) == "eins <b>zwei.</b><b> Drei</b> {x}. Elf {x}"
    translated = [one.text for one in translator.translate(pieces)]
    assert len(translated) == 3
    assert translate(translator, join(list(map(str, lines)))) == [join(["".join(translated)])]


def test_alternatives_have_the_tags_too(build):
    translator = build(markup="html", num_beams=2, num_hypotheses=2)

    for fragment in ("<p>ab <b>cd</b></p>", "<p></p>"):
        (best,) = translator.translate([fragment])
        (other,) = best.alternatives
        for one in (best, other):
            assert Outline(one.text).is_balanced
            assert one.text.count("<") == fragment.count("<")
