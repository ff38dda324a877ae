# ruff: noqa: SIM905
"""Fragments of HTML: their text is translated, and tags follow their words.

Text between two tags of blocks is one line for the model, with marks for the inline
tags, see `marks.py`. Comments, scripts, styles and elements with `translate="no"` stay as they are,
and so does each tag that is kept. Each element is closed, and an end tag without a start is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from html import escape, unescape
from html.parser import HTMLParser

from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.translation.placing import MARK, MOST_MARKS, mark

# What is between two of their tags is a line.
_BLOCKS = frozenset(
    "address article aside blockquote body br caption center col colgroup dd details dialog dir "
    "div dl dt fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header "
    "hr html legend li link main menu meta nav noframes ol optgroup option p pre section summary "
    "table tbody td template textarea tfoot th thead title tr ul".split()
)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_NOT_TRANSLATED = frozenset({"script", "style"})
# Elements that a new one ends, if it is directly in them.
_ENDED_BY = {
    "li": {"li"},
    "dt": {"dt", "dd"},
    "dd": {"dt", "dd"},
    "option": {"option"},
    "tr": {"td", "th", "tr"},
    "td": {"td", "th"},
    "th": {"td", "th"},
    **{
        name: {"p"}
        for name in "p div ul ol dl table h1 h2 h3 h4 h5 h6 pre blockquote section article hr "
        "form".split()
    },
}
_DEEPEST = 100
_SPACE = re.compile(r"[ \t\n\r\f]+")
_LETTER = re.compile(r"[^\W\d_]|\d")


@dataclass
class Element:
    """A tag with its content, text, or a part that stays as it is.

    Attributes:
        name: In lower case; empty for text, a comment and the like.
        start: The tag, or the part that stays as it is.
        end: The end tag.
        text: Text that is shown.
        inner: Its content.
        is_translated: False: it stays as it is.
    """

    name: str = ""
    start: str = ""
    end: str = ""
    text: str = ""
    inner: list[Element] = field(default_factory=list)
    is_translated: bool = True

    @property
    def is_inline(self) -> bool:
        """Whether it is in a line."""
        if not self.name:
            return True
        return self.name not in _BLOCKS and all(element.is_inline for element in self.inner)

    @property
    def shown(self) -> str:
        """All text in it."""
        return self.text + "".join(element.shown for element in self.inner)

    def __str__(self) -> str:
        """As it was written."""
        return f"{self.start}{''.join(map(str, self.inner))}{self.end}"


class _Parser(HTMLParser):
    """Makes elements of a fragment, none of which is left open.

    Args:
        fragment: Of HTML.
    """

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self._fragment = fragment
        self._line_starts = [0, *(found.end() for found in re.finditer("\n", fragment))]
        # Where the last thing that was found begins, and what is to have it as it is written.
        self._written: tuple[int, Element, str] | None = None
        self.whole = Element("html")
        self._open = [self.whole]

    def read(self) -> tuple[Element, str]:
        """An element with all that is in the fragment, and a tag or comment without an end."""
        self.feed(self._fragment)
        # What is not complete.
        rest, self.rawdata = self.rawdata, ""
        if rest and not (self.cdata_elem or re.match("<[a-zA-Z/!?]", rest)):
            self._add(Element(text=unescape(rest)))
            rest = ""
        self._keep_written(len(self._fragment) - len(rest))
        if self.cdata_elem:
            self._open[-1].inner.append(Element(start=rest))
            rest = ""
        while len(self._open) > 1:
            self._close()
        return self.whole, rest

    def _keep_written(self, end: int) -> None:
        if self._written:
            start, element, name = self._written
            setattr(element, name, self._fragment[start:end])
            self._written = None

    def _begin(self, element: Element | None = None, name: str = "start") -> None:
        """Notes that something begins, which ends the part before it."""
        line, column = self.getpos()
        place = self._line_starts[line - 1] + column
        self._keep_written(place)
        if element:
            self._written = place, element, name

    def _add(self, element: Element) -> None:
        self._begin(element)
        self._open[-1].inner.append(element)

    def _close(self) -> None:
        element = self._open.pop()
        tag = re.match(r"<([^\s/>]+)", element.start)
        element.end = f"</{tag[1] if tag else element.name}>"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element, unless it cannot have anything in it."""
        start = self.get_starttag_text() or ""
        while self._open[-1].name in _ENDED_BY.get(tag, ()):
            self._begin()
            self._close()
        is_kept = (dict(attrs).get("translate") or "").lower() == "no"
        element = Element(tag, start, is_translated=not (is_kept or tag in _NOT_TRANSLATED))
        self._begin()
        self._open[-1].inner.append(element)
        if tag in _VOID or start.endswith("/>"):
            return
        if len(self._open) > _DEEPEST:
            raise ValueError(f"Elements of HTML must be at most {_DEEPEST} deep, got {start:.60}.")
        self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        """Closes an element, and those in it; a tag without one is dropped."""
        self._begin()
        if tag in (element.name for element in self._open[1:]):
            while self._open[-1].name != tag:
                self._close()
            self._begin(self._open.pop(), "end")

    def handle_data(self, data: str) -> None:
        """Adds text, whose entities are decoded."""
        self._add(Element(text=data))

    def handle_comment(self, data: str) -> None:
        """Adds what stays as it is."""
        self._add(Element(is_translated=False))

    # Their arguments have other names.
    handle_decl = handle_pi = unknown_decl = handle_comment  # type: ignore[assignment]


# Parts of a fragment that stay as they are, and inline elements by mark for each line.
_Frame = list[str | list[Element]]


def split_html(fragment: str) -> tuple[list[str], Callable[[list[str]], str]]:
    """The lines of a fragment, with marks, and what makes a fragment of their translations.

    Raises:
        ValueError: If it is nested too deeply, or a line has too many tags.
    """
    lines: list[str] = []
    frame: _Frame = []
    whole, rest = _Parser(fragment).read()
    _split(whole, lines, frame, is_raw=False)
    frame.append(rest)
    return lines, partial(_join, frame)


def _split(element: Element, lines: list[str], frame: _Frame, *, is_raw: bool) -> None:
    """Adds the lines of a block, and the parts between them."""
    run: list[Element] = []
    is_raw = is_raw or element.name == "pre"

    def end_line() -> None:
        if any(map(_has_words, run)):
            marks: list[Element] = []
            line = "".join(_marked(one, marks) for one in run)
            lines.append(line if is_raw else _SPACE.sub(" ", line))
            frame.append(marks)
        else:
            frame.extend(map(str, run))
        run.clear()

    for one in element.inner:
        is_inline = one.is_inline and not (is_raw and "\n" in one.shown)
        if is_inline:
            run.append(one)
        elif one.name and one.is_translated:
            end_line()
            frame.append(one.start)
            _split(one, lines, frame, is_raw=is_raw)
            frame.append(one.end)
        elif one.is_translated:
            # Preformatted text.
            for place, text in enumerate(one.text.split("\n")):
                if place:
                    end_line()
                    frame.append("\n")
                run.append(Element(start=_escaped(text), text=text))
        else:
            end_line()
            frame.append(str(one))
    end_line()


def _has_words(element: Element) -> bool:
    if not element.is_translated:
        return False
    return bool(_LETTER.search(element.text)) or any(map(_has_words, element.inner))


def _marked(element: Element, marks: list[Element]) -> str:
    """Text of an inline element, with marks for its tags; adds these elements to `marks`."""
    if not element.name and element.is_translated:
        # What text has of such characters is marked itself.
        parts = re.split(f"({MARK.pattern})", element.text)
        parts[1::2] = [
            _marked(Element(start=sign, is_translated=False), marks) for sign in parts[1::2]
        ]
        return "".join(parts)
    number = len(marks)
    if number > MOST_MARKS:
        raise ValueError(
            f"A line of HTML must have at most {MOST_MARKS:,} tags, got more. Send it in parts."
        )
    marks.append(element)
    if not element.is_translated or not element.name:
        shown = without_blank_ends(element.shown) if element.name not in _NOT_TRANSLATED else ""
        return mark(number, MARK.sub("", shown), is_kept=bool(shown))
    return mark(number, "".join(_marked(one, marks) for one in element.inner))


def _join(frame: _Frame, lines: list[str]) -> str:
    """The fragment with other lines, which have the marks of its own."""
    rest = iter(lines)
    return "".join(part if isinstance(part, str) else _unmarked(next(rest), part) for part in frame)


def _unmarked(line: str, marks: list[Element]) -> str:
    """A line with tags in place of its marks."""
    parts, last, kept = [], 0, False
    for found in MARK.finditer(line):
        if not kept:
            parts.append(_escaped(line[last : found.start()]))
        last = found.end()
        # Marks of both kinds have their numbers in the lower 16 bits.
        number, is_end = divmod(ord(found[0]) & 0xFFFF, 2)
        element = marks[number]
        if element.name and element.is_translated:
            parts.append(element.end if is_end else element.start)
        elif not is_end:
            parts.append(str(element))
        kept = not is_end and not (element.name and element.is_translated)
    return "".join([*parts, _escaped(line[last:])])


def _escaped(text: str) -> str:
    return escape(text, quote=False).replace("\xa0", "&nbsp;")
