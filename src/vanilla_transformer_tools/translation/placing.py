# ruff: noqa: RUF001
"""Marked parts of a line, and their places in its translation.

A span has what is written before and after it, as tags are. One without text in it marks a place,
and one that is kept is an item, which is written as it was.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from vanilla_transformer_tools.text.blanks import UNBLANKED, blank_ends, without_blank_ends
from vanilla_transformer_tools.translation.results import Piece

# Words, and letters of scripts without blanks.
_UNIT = re.compile(rf"[{UNBLANKED}]|[^\W{UNBLANKED}]+(?:[-'’][^\W{UNBLANKED}]+)*")
_PUNCTUATION = "!\"#%&'()*,-./:;?@[]_{}¡¿«»‘’‚“”„‹›…、。！？「」『』（），：；"

# Beginning and end of a token in the source, and of one in the target that is aligned to it.
CharacterLink = tuple[int, int, int, int]


@dataclass
class Span:
    """A marked part of a text, or an item that stays as it is.

    Attributes:
        start: Where it begins.
        end: Where it ends; the same place if nothing is marked but the place.
        depth: Number of spans around it. Spans are listed as they begin, outer ones first.
        opening: What is written before it; empty for an item.
        closing: What is written after it; empty for an item, too.
        kept: What is written for an item.
        window: Where it is in the translation.
    """

    start: int
    end: int
    depth: int = 0
    opening: str = ""
    closing: str = ""
    kept: str | None = None
    window: tuple[int, int] = (0, 0)


@dataclass
class MarkedPiece:
    """A line or a part of one, as the model gets it.

    Attributes:
        text: With symbols for the items that have one.
        spans: In this text.
        parts: What is translated separately; none of a blank text.
        is_html: Whether its translation is written as HTML.
    """

    text: str
    spans: list[Span] = field(default_factory=list)
    parts: list[Piece] = field(default_factory=list)
    is_html: bool = False

    def __len__(self) -> int:
        """Characters of the text."""
        return len(self.text)

    def __str__(self) -> str:
        """As it was written, with its marks and items."""
        spans = [replace(span, window=(span.start, span.end)) for span in self.spans]
        return _written(self.text, spans, self.escaped)

    def escaped(self, text: str) -> str:
        """Text as it is written between marks."""
        return escape(text, quote=False) if self.is_html else text


# A line for a translator.
Line = str | MarkedPiece


def is_around(span: Span, text: str, start: int = 0, end: int | None = None) -> bool:
    """Whether a span has all words of `text[start:end]`."""
    others = text[start : span.start] + text[span.end : end]
    return span.start < span.end and not without_blank_ends(others)


@dataclass(frozen=True)
class _Unit:
    """A word of the translation, or an item in it, and the places in the source it is linked to."""

    start: int
    end: int
    # Middle of a source token, and the number of characters that are linked to it.
    sources: tuple[tuple[float, int], ...]

    def is_of(self, span: Span) -> bool:
        """Whether most of it is linked to a span of the source."""
        inside = sum(size for place, size in self.sources if span.start <= place < span.end)
        return 2 * inside > sum(size for _, size in self.sources)


class Placing:
    """A translation with the marks and items of its source.

    Attributes:
        text: It, with them.
        missing: Number of items that it lacked, which are appended.

    Args:
        piece: The source.
        translation: Of its text.
        links: Between the characters of the two.
    """

    def __init__(
        self, piece: MarkedPiece, translation: str, links: Sequence[CharacterLink]
    ) -> None:
        self.source, self.target, self.links = piece.text, translation, links
        before, after = blank_ends(translation)
        self.begin = len(before) if len(before) < len(translation) else 0
        self.end = max(self.begin, len(translation) - len(after))
        self.items = [span for span in piece.spans if span.kept is not None]
        self.spans = [span for span in piece.spans if span.kept is None]
        self.words = [self._linked(*found.span()) for found in _UNIT.finditer(translation)]
        # An item is where it has been copied, or its symbol; else where its words are.
        taken: list[tuple[int, int]] = []

        def is_free(window: tuple[int, int]) -> bool:
            return all(window[1] <= start or end <= window[0] for start, end in taken)

        waiting = self.items
        for places_of in (self._copies_of, self._words_of):
            for item in waiting:
                item.window = next(filter(is_free, places_of(item)), (self.end, self.end))
                if item.window[0] < item.window[1]:
                    taken.append(item.window)
            waiting = [item for item in waiting if item.window[0] == item.window[1]]
        self.missing = len(waiting)
        items = [
            _Unit(*item.window, (((item.start + item.end) / 2, 1),))
            for item in self.items
            if item.window[0] < item.window[1]
        ]
        words = [word for word in self.words if is_free((word.start, word.end))]
        self.units = sorted([*items, *words], key=lambda unit: unit.start)
        self._place_spans()
        self.text = _written(translation, piece.spans, piece.escaped)

    def _copies_of(self, item: Span) -> Iterator[tuple[int, int]]:
        """Where the text of an item is that is no part of a longer word or number."""
        text = self.source[item.start : item.end]
        before = r"(?<!\w)" if text[:1].isalnum() else ""
        after = r"(?!\w)" if text[-1:].isalnum() else ""
        for found in re.finditer(before + re.escape(text) + after, self.target):
            yield found.span()

    def _words_of(self, item: Span) -> list[tuple[int, int]]:
        """The longest run of words that are linked to an item, if there are any."""
        runs: list[tuple[int, int]] = []
        for word in self.words:
            if any(item.start <= place < item.end for place, _ in word.sources):
                if runs and not self.target[runs[-1][1] : word.start].strip():
                    runs[-1] = runs[-1][0], word.end
                else:
                    runs.append((word.start, word.end))
        return sorted(runs, key=lambda run: run[0] - run[1])[:1]

    def _linked(self, start: int, end: int) -> _Unit:
        """A word of the translation with the middles of the source tokens it is linked to."""
        sources = tuple(
            ((first + last) / 2, min(until, end) - max(begin, start))
            for first, last, begin, until in self.links
            if begin < end and start < until
        )
        return _Unit(start, end, sources)

    def _place_spans(self) -> None:
        """Places each span around its words, inner ones within outer ones."""
        whole = Span(0, len(self.source), window=(self.begin, self.end))
        below = _below(whole, self.spans)
        waiting = [(whole, range(len(self.units)))]
        while waiting:
            outer, units = waiting.pop()
            with_words = []
            for span in below[id(outer)]:
                if self.source[span.start : span.end].strip():
                    with_words.append(span)
                else:
                    place = sorted([self._place_of(span.start), *outer.window])[1]
                    span.window = place, place
                    waiting.append((span, range(0)))
            waiting += self._share(outer, units, with_words)

    def _share(self, outer: Span, units: range, spans: Sequence[Span]) -> list[tuple[Span, range]]:
        """Gives each of the spans in another one its units, and sets their windows."""
        free = set(units)
        chosen: dict[int, range] = {}

        def take(span: Span, window: range) -> None:
            chosen[id(span)] = window
            free.difference_update(window)

        for span in spans:
            has_all = is_around(span, self.source, outer.start, outer.end)
            window = units if has_all else self._best_window(span, units, free)
            if window:
                take(span, window)
        for span in spans:
            if id(span) not in chosen:
                place = (span.start + span.end) / 2 - outer.start
                length = max(1, outer.end - outer.start)
                wanted = units.start + place / length * len(units) - 0.5
                nearest = min(free, key=lambda unit: abs(unit - wanted), default=None)
                take(span, range(0) if nearest is None else range(nearest, nearest + 1))
        last = outer.window[0]
        found = [(span, chosen[id(span)]) for span in spans]
        for span, window in sorted(found, key=lambda one: one[1].start if one[1] else -1):
            last = self._set_window(span, window, outer, units, last)
        return found

    def _best_window(self, span: Span, units: range, free: set[int]) -> range | None:
        """Units in a row with the most of a span's and the fewest others."""
        of_span = [unit in free and self.units[unit].is_of(span) for unit in units]
        words = len(_UNIT.findall(self.source, span.start, span.end))
        best: tuple[int, int, int, int] | None = None
        for first, is_first in enumerate(of_span):
            if not is_first:
                continue
            gain = 0
            for last in range(first, len(of_span)):
                if units[last] not in free:
                    break
                gain += 1 if of_span[last] else -1
                if of_span[last]:
                    score = gain, -abs(last + 1 - first - words), first, last
                    best = max(best or score, score, key=lambda one: one[:2])
        return range(units[best[2]], units[best[3]] + 1) if best else None

    def _set_window(self, span: Span, window: range, outer: Span, units: range, last: int) -> int:
        """Sets the characters of a span; returns where the next one may begin."""
        if not window:
            span.window = last, last
            return last
        start, end = self.units[window[0]].start, self.units[window[-1]].end
        if window == units:
            start, end = outer.window
        else:
            text = self.source[span.start : span.end].strip()
            before = len(text) - len(text.lstrip(_PUNCTUATION))
            after = len(text) - len(text.rstrip(_PUNCTUATION))
            free = [*self.target]
            for item in self.items:
                free[slice(*item.window)] = " " * (item.window[1] - item.window[0])
            while before and start > outer.window[0] and free[start - 1] in _PUNCTUATION:
                before, start = before - 1, start - 1
            while after and end < outer.window[1] and free[end] in _PUNCTUATION:
                after, end = after - 1, end + 1
        span.window = max(start, last), max(end, last)
        return span.window[1]

    def _place_of(self, place: int) -> int:
        """Where a place of the source is in the translation: next to the same word."""
        is_after = place > 0 and not self.source[place - 1].isspace()
        following = len(self.source) - len(self.source[place:].lstrip())
        if not is_after and following == len(self.source):
            return self.end
        if not is_after and not self.source[:place].strip():
            return self.begin
        word = place - 1 if is_after else following
        # Its whole word, whose tokens may begin elsewhere.
        words = (found.span() for found in _UNIT.finditer(self.source))
        start, end = next((span for span in words if span[0] <= word < span[1]), (word, word + 1))
        marked = Span(start, end)
        units = [unit for unit in self.units if unit.is_of(marked)]
        if units:
            return units[-1].end if is_after else units[0].start
        if not self.units:
            return self.end
        wanted = place / max(1, len(self.source)) * len(self.units)
        nearest = self.units[min(len(self.units) - 1, int(wanted))]
        return nearest.end if is_after else nearest.start


def _below(whole: Span, spans: Sequence[Span]) -> dict[int, list[Span]]:
    """The spans directly in each span, by `id`, and in `whole`, the text."""
    below: dict[int, list[Span]] = {id(whole): []}
    path: list[Span] = []
    for span in spans:
        while path and path[-1].depth >= span.depth:
            path.pop()
        below[id(path[-1] if path else whole)].append(span)
        below[id(span)] = []
        path.append(span)
    return below


def _written(text: str, spans: Sequence[Span], escaped: Callable[[str], str]) -> str:
    """A text with the marks of spans at their windows, and items instead of the text there."""
    whole = Span(0, len(text), window=(0, len(text)))
    below = _below(whole, [span for span in spans if span.kept is None])
    items = sorted((span for span in spans if span.kept is not None), key=lambda one: one.window)
    appended = [item for item in items if item.window[0] == item.window[1]]
    items = [item for item in items if item.window[0] < item.window[1]]
    parts: list[str] = []
    last = 0

    def write_up_to(end: int) -> None:
        nonlocal last
        while items and items[0].window[1] <= end:
            item = items.pop(0)
            parts.append(escaped(text[last : item.window[0]]))
            parts.append(f"{item.opening}{item.kept}{item.closing}")
            last = item.window[1]
        parts.append(escaped(text[last:end]))
        last = max(last, end)

    def write(span: Span) -> None:
        write_up_to(max(last, span.window[0]))
        parts.append(span.opening)
        for inner in sorted(below[id(span)], key=lambda one: one.window):
            write(inner)
        if span is whole and appended:
            write_up_to(appended[0].window[0])
            before = "".join(parts)
            for item in appended:
                blank = " " * bool(before and not before[-1].isspace())
                parts.append(f"{blank}{item.opening}{item.kept}{item.closing}")
                before = parts[-1]
        write_up_to(max(last, span.window[1]))
        parts.append(span.closing)

    write(whole)
    return "".join(parts)
