# ruff: noqa: SIM905
"""Fragments of HTML: their text is translated, and tags follow their words.

Text between two tags of blocks is one line for the model, with spans for the inline tags, see
`placing.py`. Comments, scripts, styles and elements with `translate="no"` stay as they are, as all
tags do. Each element is closed, and an end tag without a start is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape, unescape

from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.translation.placing import Line, MarkedPiece, Span

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
_OPENING = re.compile("<(?=[a-zA-Z!?/])")
# A comment, a declaration and the like, an end tag, or a start tag; an attribute may hold `>`.
_TAG = re.compile(
    r"<!--(?s:.*?)--!?>|<!\[CDATA\[(?s:.*?)\]\]>|</(?P<end>[a-zA-Z][^\s/>]*)[^>]*>"
    r"|<(?!!--|!\[CDATA\[)[!?/][^>]*>"
    r"""|<(?P<start>[a-zA-Z][^\s/>]*)(?P<attributes>(?:=\s*+(?:"[^"]*"|'[^']*')"""
    r"""|=(?!\s*["'])|[^>=])*+)>"""
)
_ATTRIBUTE = re.compile(r"""([^\s"'/=]+)\s*=\s*("[^"]*"|'[^']*'|[^\s"']+)""")
_SPACE = re.compile(r"[ \t\n\r\f]+")
_LETTER = re.compile(r"[^\W\d_]|\d")


@dataclass
class _Element:
    """A tag with its content, text that is shown, or a part that stays as it is written.

    The name is in lower case, and empty for text, comments and the like.
    """

    name: str = ""
    start: str = ""
    end: str = ""
    text: str = ""
    inner: list[_Element] = field(default_factory=list)
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


def _parse(fragment: str) -> tuple[_Element, str]:
    """An element with all that is in a fragment, and the rest from a tag without an end."""
    whole = _Element("html")
    # The elements that are open.
    path = [whole]
    place = 0
    while place < len(fragment):
        is_text = path[-1].name not in _NOT_TRANSLATED
        opening = _OPENING if is_text else re.compile(rf"(?i)</(?={path[-1].name}[\s/>])")
        found = opening.search(fragment, place)
        end = found.start() if found else len(fragment)
        if raw := fragment[place:end]:
            text = unescape(raw) if is_text else raw
            path[-1].inner.append(_Element(start=raw, text=text))
        tag = found and _TAG.match(fragment, end)
        if not tag:
            return whole, fragment[end:]
        place = tag.end()
        if tag["start"]:
            _open(path, tag)
        elif not tag["end"]:
            path[-1].inner.append(_Element(start=tag[0], is_translated=False))
        elif (name := tag["end"].lower()) in (element.name for element in path[1:]):
            while path[-1].name != name:
                path.pop()
            path.pop().end = tag[0]
    return whole, ""


def _open(path: list[_Element], tag: re.Match[str]) -> None:
    """Adds the element of a start tag, and opens it unless it cannot have anything in it."""
    name = tag["start"].lower()
    while path[-1].name in _ENDED_BY.get(name, ()):
        path.pop()
    values = {one.lower(): value for one, value in _ATTRIBUTE.findall(tag["attributes"])}
    is_kept = values.get("translate", "").strip("\"'").lower() == "no"
    element = _Element(name, tag[0], is_translated=not (is_kept or name in _NOT_TRANSLATED))
    path[-1].inner.append(element)
    if name in _VOID or tag[0].endswith("/>"):
        return
    if len(path) > _DEEPEST:
        raise ValueError(f"Elements of HTML must be at most {_DEEPEST} deep, got {tag[0]:.60}.")
    # Unless there is an end tag.
    element.end = f"</{tag['start']}>"
    path.append(element)


# Lines of a text, and what makes a text of their translations.
Split = tuple[Sequence[Line], Callable[[list[str]], str]]


def split_html(fragment: str) -> tuple[list[MarkedPiece], Callable[[list[str]], str]]:
    """The lines of a fragment, and what makes a fragment of their translations.

    Raises:
        ValueError: If it is nested too deeply.
    """
    whole, rest = _parse(fragment)
    # Lines, and between them what stays as it is.
    frame: list[Line] = []
    _split(whole, frame, is_raw=False)

    def join(translations: list[str]) -> str:
        waiting = iter(translations)
        parts = (part if isinstance(part, str) else next(waiting) for part in frame)
        return "".join(parts) + rest

    return [part for part in frame if isinstance(part, MarkedPiece)], join


def _split(element: _Element, frame: list[Line], *, is_raw: bool) -> None:
    """Adds the lines of a block, and the parts between them."""
    run: list[_Element] = []
    is_raw = is_raw or element.name == "pre"

    def end_line() -> None:
        if any(map(_has_words, run)):
            line = MarkedPiece("", is_html=True)
            for one in run:
                _add(one, line, 0, is_raw=is_raw)
            frame.append(line)
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
            _split(one, frame, is_raw=is_raw)
            frame.append(one.end)
        elif one.is_translated:
            # Preformatted text.
            for place, text in enumerate(one.text.split("\n")):
                if place:
                    end_line()
                    frame.append("\n")
                run.append(_Element(start=escape(text, quote=False), text=text))
        else:
            end_line()
            frame.append(str(one))
    end_line()


def _has_words(element: _Element) -> bool:
    if not element.is_translated:
        return False
    return bool(_LETTER.search(element.text)) or any(map(_has_words, element.inner))


def _add(element: _Element, line: MarkedPiece, depth: int, *, is_raw: bool) -> None:
    """Adds an inline element to a line: its text, and a span for its tags."""
    start, number = len(line.text), len(line.spans)
    if not element.name and element.is_translated:
        line.text += element.text if is_raw else _SPACE.sub(" ", element.text)
        return
    span = Span(start, start, depth)
    line.spans.append(span)
    if element.is_translated:
        for one in element.inner:
            _add(one, line, depth + 1, is_raw=is_raw)
        span.opening, span.closing = element.start, element.end
    elif element.name not in _NOT_TRANSLATED and (shown := without_blank_ends(element.shown)):
        line.text += shown if is_raw else _SPACE.sub(" ", shown)
        span.kept = str(element)
    span.end = len(line.text)
    if span.start == span.end:
        # What is in a place stays together.
        span.opening, span.closing = str(element), ""
        del line.spans[number + 1 :]
