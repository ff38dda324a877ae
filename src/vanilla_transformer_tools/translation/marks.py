# ruff: noqa: RUF001
"""Marks in a line, which follow their words into its translation, and items that stay as they are.

A mark is a private-use character: an opening one and its closing one enclose what they mark, as
tags do, and two without text between them mark a place. Marks of a second kind enclose text that
stays as it is. See `markup.py` for what becomes of them.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from vanilla_transformer_tools.text.blanks import blank_ends, without_blank_ends
from vanilla_transformer_tools.text.languages import end_length
from vanilla_transformer_tools.translation.engine_choice import as_torch
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.protected import find_items, symbols_for
from vanilla_transformer_tools.translation.segments import cut_lines, without_surrogates

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation.translator import Translation, Translator

logger = logging.getLogger(__name__)

# Planes 15 and 16 of Unicode. Even ones open, odd ones close.
_TAGS, _KEPT, _LAST = 0xF0000, 0x100000, 0x10FFFF
MOST_MARKS = (_KEPT - _TAGS) // 2 - 1
MARK = re.compile(f"[{chr(_TAGS)}-{chr(_LAST)}]")
# Words, and letters of scripts without blanks.
_UNIT = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003134f]|[^\\W"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003134f]+"
)
_PAIRS_PER_BATCH = 64

# Beginning and end of a token in the source, and of one in the target that is aligned to it.
CharacterLink = tuple[int, int, int, int]


def mark(number: int, text: str, *, is_kept: bool = False) -> str:
    """Text between marks of this number, from 0 to `MOST_MARKS`."""
    opening = (_KEPT if is_kept else _TAGS) + 2 * number
    return f"{chr(opening)}{text}{chr(opening + 1)}"


@dataclass
class Span:
    """What is marked in a text, or an item that stays as it is.

    Attributes:
        start: Where it begins.
        end: Where it ends; the same place if nothing is marked but the place.
        depth: Number of spans around it. Spans are listed as they begin, outer ones first.
        opening: Its mark; empty for an item, or if it is in an earlier piece of the line.
        closing: Its mark; empty likewise.
        kept: Text of an item.
        window: Where it is in the translation.
    """

    start: int
    end: int
    depth: int = 0
    opening: str = ""
    closing: str = ""
    kept: str | None = None
    window: tuple[int, int] = (0, 0)


def unmark(line: str) -> tuple[str, list[Span]]:
    """The text of a line, and what is marked in it."""
    parts: list[str] = []
    spans: list[Span] = []
    open_spans: list[tuple[Span, int]] = []
    length = last = outermost = 0
    for found in MARK.finditer(line):
        parts.append(line[last : found.start()])
        length += len(parts[-1])
        last = found.end()
        if ord(found[0]) % 2 == 0:
            span = Span(length, -1, outermost + len(open_spans), found[0], chr(ord(found[0]) + 1))
            open_spans.append((span, found.start()))
            spans.append(span)
        elif open_spans and open_spans[-1][0].closing == found[0]:
            span, begin = open_spans.pop()
            span.end = length
            if span.start == length:
                # The marks of a place stay together.
                del spans[spans.index(span) + 1 :]
                span.opening = line[begin : found.start()]
        else:
            outermost -= 1
            spans.insert(0, Span(0, length, outermost, closing=found[0]))
    parts.append(line[last:])
    text = "".join(parts)
    for span, _ in open_spans:
        span.end, span.closing = len(text), ""
    for span in spans:
        if ord((span.opening or span.closing)[0]) >= _KEPT and span.start < span.end:
            span.kept = text[span.start : span.end]
    return text, spans


def remark(text: str, spans: Sequence[Span]) -> str:
    """The inverse of `unmark`."""
    return _written(text, [replace(span, window=(span.start, span.end)) for span in spans])


@dataclass
class MarkedPiece:
    """A line or a part of one, as the model gets it.

    Attributes:
        text: With symbols for the items that have one.
        spans: In this text.
    """

    text: str
    spans: list[Span] = field(default_factory=list)


def cut_marked(
    line: str,
    cut: Callable[[str], list[str]],
    find: Callable[[str], list[Span]] | None = None,
    symbols: Sequence[str] = (),
) -> list[MarkedPiece]:
    """The pieces of a line with marks; an item is never cut.

    Args:
        line: With marks.
        cut: Cuts a text without marks; the pieces together are the text.
        find: Items in a text without marks; None: only those that are marked.
        symbols: See `symbols_for`.
    """
    text, spans = unmark(line)
    for item in find(text) if find else ():
        others = [span for span in spans if span.kept is not None]
        is_free = all(span.end <= item.start or item.end <= span.start for span in others)
        edges = {edge for span in spans for edge in (span.start, span.end)}
        if is_free and not any(item.start < edge < item.end for edge in edges):
            spans.append(item)
    text, spans = _with_symbols(text, spans, symbols)
    parts = cut(text)
    if not parts:
        return [MarkedPiece(text, spans)]
    edges = list(accumulate(map(len, parts)))[:-1]
    kept = [span for span in spans if span.kept is not None]
    edges = [edge for edge in edges if not any(one.start < edge < one.end for one in kept)]
    pieces = []
    for start, end in zip([0, *edges], [*edges, len(text)], strict=True):
        inside = [_part_of(span, start, end, end == len(text)) for span in spans]
        pieces.append(MarkedPiece(text[start:end], [span for span in inside if span]))
    return pieces


def _part_of(span: Span, start: int, end: int, is_last: bool) -> Span | None:
    """The part of a span in a piece of the line."""
    if span.start == span.end:
        is_inside = start <= span.start < end or (is_last and span.start == end)
    else:
        is_inside = span.start < end and start < span.end
    if not is_inside:
        return None
    return replace(
        span,
        start=max(span.start, start) - start,
        end=min(span.end, end) - start,
        opening=span.opening if span.start >= start else "",
        closing=span.closing if span.end <= end else "",
    )


def _with_symbols(text: str, spans: list[Span], symbols: Sequence[str]) -> tuple[str, list[Span]]:
    """The text with symbols in place of items, and the spans there."""
    kept = sorted((span for span in spans if span.kept), key=lambda span: span.start)
    chosen = symbols_for([span.kept or "" for span in kept], symbols)
    parts, ends, moves = [], [], [0]
    last = 0
    for span in kept:
        symbol = chosen.get(span.kept or "", span.kept or "")
        parts += [text[last : span.start], symbol]
        last = span.end
        ends.append(last)
        moves.append(moves[-1] + len(symbol) - (span.end - span.start))

    def moved(place: int) -> int:
        return place + moves[bisect_right(ends, place)]

    return "".join([*parts, text[last:]]), [
        replace(span, start=moved(span.start), end=moved(span.end)) for span in spans
    ]


def cut_marked_lines(
    lines: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    *,
    split_sentences: bool = False,
) -> list[list[tuple[str, int]]]:
    """As `cut_lines`, for lines that may have marks; each piece with its number of tokens."""
    texts = [unmark(line)[0] if MARK.search(line) else line for line in lines]
    cut = cut_lines(texts, tokenizer, max_tokens, split_sentences=split_sentences)
    result = []
    for line, pieces in zip(lines, cut, strict=True):
        found = [text for text, _ in pieces]
        if pieces and MARK.search(line):
            marked = cut_marked(line, lambda _, parts=found: parts)  # type: ignore[misc]
            found = [remark(piece.text, piece.spans) for piece in marked]
        # Items may have joined some.
        lengths = [len(ids) for _, ids in pieces]
        lengths = lengths if len(found) == len(pieces) else [max_tokens] * len(found)
        result.append(list(zip(found, lengths, strict=True)))
    return result


def translate_marked(
    translator: Translator, window: Sequence[tuple[str, str]], first_line: int
) -> Iterator[Translation]:
    """Translates a window of lines whose marks and items must be in the translations too.

    Args:
        translator: Of the lines; the items are of the kinds that it protects.
        window: Lines with their prefixes.
        first_line: Number of the first line, for warnings.
    """
    from vanilla_transformer_tools.translation.translator import _join

    kinds, symbols = translator.protect, translator.symbols

    def find(text: str) -> list[Span]:
        return [Span(*place, kept=text[slice(*place)]) for place in find_items(text, kinds)]

    def cut(text: str) -> list[str]:
        room = translator.max_source_length - len(translator.source_prefix)
        sentences = translator.split_sentences
        (pieces,) = cut_lines([text], translator.tokenizer, room, split_sentences=sentences)
        return [piece for piece, _ in pieces]

    rows = [
        cut_marked(without_surrogates(line), cut, find, symbols)
        if MARK.search(line) or next(find_items(line, kinds), None)
        else [MarkedPiece(line)]
        for line, _ in window
    ]
    if not any(piece.spans for row in rows for piece in row):
        yield from translator._translate_window(window, first_line)
        return
    pieces = [
        (piece.text, prefix if number == 0 else "")
        for row, (_, prefix) in zip(rows, window, strict=True)
        for number, piece in enumerate(row)
    ]
    translations, fault = [], None
    try:
        # Not by `extend`, so that those before an error are kept.
        for translation in translator._translate_window(pieces, first_line):
            translations.append(translation)
    except Exception as error:
        fault = error
    flat = [piece for row in rows for piece in row][: len(translations)]
    finished = iter(_restored(translator, flat, translations))
    left = len(translations)
    for number, row in enumerate(rows):
        left -= len(row)
        if left < 0 and fault:
            raise fault
        parts = [next(finished) for _ in row]
        if missing := sum(lacking for _, lacking in parts):
            logger.warning(
                "Line %d: %d protected items were missing in the translation and are appended.",
                first_line + number,
                missing,
            )
        ranked = zip(*([one, *one.alternatives] for one, _ in parts), strict=True)
        best, *others = map(_join, ranked)
        yield replace(best, alternatives=tuple(others))


def _restored(
    translator: Translator, pieces: Sequence[MarkedPiece], translations: Sequence[Translation]
) -> Iterator[tuple[Translation, int]]:
    """Translations with the marks and items of their pieces, and how many of the best one's lacked.

    Args:
        translator: What has translated.
        pieces: In order.
        translations: Of each.
    """
    wanted = []
    for piece, best in zip(pieces, translations, strict=True):
        if any(span.kept or not _is_around(span, piece.text) for span in piece.spans):
            wanted += [(piece.text, one.text) for one in (best, *best.alternatives)]
    links = dict(zip(wanted, character_links(translator, wanted), strict=True))
    for piece, best in zip(pieces, translations, strict=True):
        texts, missing = [], []
        for one in (best, *best.alternatives):
            text, lacking = restored(piece, one.text, links.get((piece.text, one.text), []))
            texts.append(text)
            missing.append(lacking)
        first, *others = texts
        alternatives = zip(best.alternatives, others, strict=True)
        alternatives = tuple(replace(one, text=text) for one, text in alternatives)
        yield replace(best, text=first, alternatives=alternatives), missing[0]


def _is_around(span: Span, text: str) -> bool:
    return span.start < span.end and not without_blank_ends(text[: span.start] + text[span.end :])


def can_align(translator: Translator) -> bool:
    """Whether marks can follow their words: the engine shows attention, tokenizers know places."""
    return isinstance(as_torch(translator.engine), TorchEngine) and all(
        tokenizer.is_fast for tokenizer in (translator.tokenizer, translator.target_tokenizer)
    )


def character_links(
    translator: Translator, pairs: Sequence[tuple[str, str]]
) -> list[list[CharacterLink]]:
    """Links between the characters of texts and of their translations, by the model's attention.

    Returns:
        The links of each pair, in order; none if nothing can be aligned.
    """
    links: list[list[CharacterLink]] = [[] for _ in pairs]
    if not pairs or not can_align(translator):
        return links
    engine = as_torch(translator.engine)
    assert isinstance(engine, TorchEngine)
    prefix, ends = translator.source_prefix, end_length(translator.tokenizer)
    order = sorted(range(len(pairs)), key=lambda number: len(pairs[number][1]))
    for first in range(0, len(order), _PAIRS_PER_BATCH):
        batch = []
        for number in order[first : first + _PAIRS_PER_BATCH]:
            source, target = (
                without_surrogates(without_blank_ends(text)) for text in pairs[number]
            )
            read = translator.tokenizer(source, return_offsets_mapping=True, verbose=False)
            written = translator.target_tokenizer(
                text_target=target, return_offsets_mapping=True, verbose=False
            )
            lengths = len(prefix) + len(read["input_ids"]), len(written["input_ids"])
            if source and target and max(lengths) <= engine.last_position:
                batch.append((number, read, written))
        if not batch:
            continue
        passes = engine.force(
            [prefix + read["input_ids"] for _, read, _ in batch],
            [written["input_ids"] for _, _, written in batch],
            align=True,
            end_length=ends,
        )
        for (number, read, written), forced in zip(batch, passes, strict=True):
            source, target = pairs[number]
            places = [_in_text(source, *offsets) for offsets in read["offset_mapping"]]
            for position, offsets in zip(forced.alignment, written["offset_mapping"], strict=True):
                token = _in_text(target, *offsets)
                if position >= len(prefix) and token[0] < token[1]:
                    links[number].append((*places[position - len(prefix)], *token))
    return links


def _in_text(text: str, start: int, end: int) -> tuple[int, int]:
    """Place of a token, without blanks, in a text of which it knows that without blank ends."""
    before = len(blank_ends(text)[0])
    token = text[before + start : before + end]
    return before + end - len(token.lstrip()), before + start + len(token.rstrip())


def restored(
    piece: MarkedPiece, translation: str, links: Sequence[CharacterLink]
) -> tuple[str, int]:
    """A translation with the marks and items of its source.

    Args:
        piece: The source.
        translation: Of its text.
        links: Between the characters of the two.

    Returns:
        The translation, and the number of items that it lacked, which are appended.
    """
    if not piece.spans:
        return translation, 0
    placing = _Placing(piece, translation, links)
    placing.place_items()
    placing.place_spans()
    return _written(translation, piece.spans), placing.missing


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


class _Placing:
    """Finds the windows of the spans of one piece."""

    def __init__(
        self, piece: MarkedPiece, translation: str, links: Sequence[CharacterLink]
    ) -> None:
        self.source, self.target, self.links = piece.text, translation, links
        before, after = blank_ends(translation)
        self.begin = len(before) if len(before) < len(translation) else 0
        self.end = max(self.begin, len(translation) - len(after))
        self.items = [span for span in piece.spans if span.kept is not None]
        self.spans = [span for span in piece.spans if span.kept is None]
        self.missing = 0

    def place_items(self) -> None:
        """An item is where it has been copied, or its symbol; else where its words are."""
        taken: list[tuple[int, int]] = []

        def is_free(window: tuple[int, int]) -> bool:
            return all(window[1] <= start or end <= window[0] for start, end in taken)

        lost = []
        for item in self.items:
            text = self.source[item.start : item.end]
            copies = (found.span() for found in re.finditer(_alone(text), self.target))
            window = next((window for window in copies if is_free(window)), None)
            if window is None:
                lost.append(item)
            else:
                item.window = window
                taken.append(window)
        for item in lost:
            window = self._words_of(item)
            if window is None or not is_free(window):
                window = self.end, self.end
                self.missing += 1
            else:
                taken.append(window)
            item.window = window
        self.units = self._find_units(taken)

    def _words_of(self, item: Span) -> tuple[int, int] | None:
        """The longest run of words that are linked to an item."""
        linked = [
            (start, end)
            for first, last, start, end in self.links
            if item.start <= (first + last) / 2 < item.end
        ]
        runs: list[list[int]] = []
        for unit in _UNIT.finditer(self.target):
            if any(start < unit.end() and unit.start() < end for start, end in linked):
                if runs and not self.target[runs[-1][1] : unit.start()].strip():
                    runs[-1][1] = unit.end()
                else:
                    runs.append([unit.start(), unit.end()])
        if not runs:
            return None
        start, end = max(runs, key=lambda run: run[1] - run[0])
        return start, end

    def _find_units(self, taken: Sequence[tuple[int, int]]) -> list[_Unit]:
        units = [
            _Unit(*item.window, (((item.start + item.end) / 2, 1),))
            for item in self.items
            if item.window[0] < item.window[1]
        ]
        for found in _UNIT.finditer(self.target):
            if all(found.end() <= start or end <= found.start() for start, end in taken):
                sources = tuple(
                    ((first + last) / 2, min(end, found.end()) - max(start, found.start()))
                    for first, last, start, end in self.links
                    if start < found.end() and found.start() < end
                )
                units.append(_Unit(*found.span(), sources))
        return sorted(units, key=lambda unit: unit.start)

    def place_spans(self) -> None:
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
                    place = min(max(self._place_of(span.start), outer.window[0]), outer.window[1])
                    span.window = place, place
                    waiting.append((span, range(0)))
            waiting += self._share(outer, units, with_words)

    def _share(self, outer: Span, units: range, spans: Sequence[Span]) -> list[tuple[Span, range]]:
        """Gives each of the spans in another one its units, and sets their windows."""
        free = set(units)
        chosen: dict[int, range] = {}
        text = self.source[outer.start : outer.end]

        def take(span: Span, window: range) -> None:
            # Those that go on in another piece reach to the end of this one.
            if window and not span.opening:
                window = range(units.start, window.stop)
            if window and not span.closing:
                window = range(window.start, units.stop)
            chosen[id(span)] = window
            free.difference_update(window)

        for span in sorted(spans, key=lambda span: bool(span.opening and span.closing)):
            inside = replace(span, start=span.start - outer.start, end=span.end - outer.start)
            window = units if _is_around(inside, text) else self._best_window(span, units, free)
            if window:
                take(span, window)
        for span in spans:
            if id(span) not in chosen:
                place = (span.start + span.end) / 2 - outer.start
                wanted = units.start + place / max(1, len(text)) * len(units) - 0.5
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
            place = outer.window[1] if span.opening and not span.closing else last
            span.window = place, place
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
        """Where a place of the source is in the translation: beside the word that it is beside."""
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


_PUNCTUATION = "!\"#%&'()*,-./:;?@[]_{}¡¿«»‘’‚“”„‹›…、。！？「」『』（），：；"


def _alone(text: str) -> str:
    """Pattern for a text that is no part of a longer word or number."""
    before = r"(?<!\w)" if text[:1].isalnum() else ""
    after = r"(?!\w)" if text[-1:].isalnum() else ""
    return before + re.escape(text) + after


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


def _written(text: str, spans: Sequence[Span]) -> str:
    """A text with the marks of spans at their windows, and items in place of what is there."""
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
            parts.append(text[last : item.window[0]])
            parts.append(f"{item.opening}{item.kept}{item.closing}")
            last = item.window[1]
        parts.append(text[last:end])
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
