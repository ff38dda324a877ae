"""Lines with marks, which follow their words, and items that stay as they are."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from vanilla_transformer_tools.text.blanks import blank_ends, without_blank_ends
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.placing import (
    MARK,
    CharacterLink,
    MarkedPiece,
    Span,
    is_around,
    remark,
    restored,
    unmark,
)
from vanilla_transformer_tools.translation.protected import find_items, symbols_for
from vanilla_transformer_tools.translation.read_pairs import (
    Reader,
    encode_source,
    encode_target,
    read_pairs,
)
from vanilla_transformer_tools.translation.results import Translation, join_ranks
from vanilla_transformer_tools.translation.search import Search
from vanilla_transformer_tools.translation.segments import (
    cut_lines,
    warn_of_cut,
    without_surrogates,
)

logger = logging.getLogger(__name__)


class LineTranslator(Reader, Protocol):
    """What `Translator` has for lines with marks."""

    search: Search
    max_source_length: int
    split_sentences: bool
    protect: tuple[str, ...]
    symbols: list[str]

    def _translate_window(
        self, window: list[tuple[str, str]], numbers: Sequence[int]
    ) -> Iterator[Translation]: ...


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
    kept = [span for span in spans if span.kept is not None]
    ends = list(accumulate(map(len, parts)))[:-1]
    borders = [edge for edge in ends if not any(one.start < edge < one.end for one in kept)]
    waiting = deque(sorted(spans, key=lambda span: span.start))
    pieces, near = [], list[Span]()
    for start, end in zip([0, *borders], [*borders, len(text)], strict=True):
        while waiting and waiting[0].start <= end:
            near.append(waiting.popleft())
        inside = [_part_of(span, start, end, end == len(text)) for span in near]
        pieces.append(MarkedPiece(text[start:end], [span for span in inside if span]))
        near = [span for span in near if span.end >= end]
    return pieces


def _part_of(span: Span, start: int, end: int, is_last: bool) -> Span | None:
    """The part of a span in a piece of the line: its marks are in each of them."""
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
    translator: LineTranslator, window: list[tuple[str, str]], first_line: int
) -> Iterator[Translation]:
    """Translates a window of lines whose marks and items must be in the translations too.

    Args:
        translator: Of the lines; the items are of the kinds that it protects.
        window: Lines with their prefixes.
        first_line: Number of the first line, for warnings.
    """
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
        yield from translator._translate_window(window, range(first_line, first_line + len(rows)))
        return
    for number, row in enumerate(rows, start=first_line):
        text = "".join(piece.text for piece in row)
        longest = translator.max_source_length
        warn_of_cut(number, text, len(row), longest, translator.split_sentences)
    pieces = [
        (piece.text, prefix if number == 0 else "")
        for row, (_, prefix) in zip(rows, window, strict=True)
        for number, piece in enumerate(row)
    ]
    numbers = [number for number, row in enumerate(rows, start=first_line) for _ in row]
    translations, fault = [], None
    try:
        # Not by `extend`, so that those before an error are kept.
        for translation in translator._translate_window(pieces, numbers):
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
        yield join_ranks([[one, *one.alternatives] for one, _ in parts])


def _restored(
    translator: LineTranslator, pieces: Sequence[MarkedPiece], translations: Sequence[Translation]
) -> Iterator[tuple[Translation, int]]:
    """Translations with the marks and items of their pieces, and how many of the best one's lacked.

    Args:
        translator: Translator of the pieces.
        pieces: In order.
        translations: Of each.
    """
    wanted = []
    for piece, best in zip(pieces, translations, strict=True):
        if any(span.kept or not is_around(span, piece.text) for span in piece.spans):
            wanted += [(piece.text, one.text) for one in (best, *best.alternatives)]
    links = dict(zip(wanted, character_links(translator, wanted), strict=True))
    for piece, best in zip(pieces, translations, strict=True):
        texts, missing = [], []
        for one in (best, *best.alternatives):
            text, lacking = restored(piece, one.text, links.get((piece.text, one.text), []))
            texts.append(text)
            missing.append(lacking)
        others = zip(best.alternatives, texts[1:], strict=True)
        alternatives = tuple(replace(one, text=text) for one, text in others)
        yield replace(best, text=texts[0], alternatives=alternatives), missing[0]


def can_align(reader: Reader) -> bool:
    """Whether marks can follow their words: the engine shows attention, tokenizers know places."""
    return isinstance(reader.engine, TorchEngine) and all(
        tokenizer.is_fast for tokenizer in (reader.tokenizer, reader.target_tokenizer)
    )


def character_links(reader: Reader, pairs: Sequence[tuple[str, str]]) -> list[list[CharacterLink]]:
    """Links between the characters of texts and of their translations, by the model's attention.

    Returns:
        The links of each pair, in order; none if nothing can be aligned.
    """
    links: list[list[CharacterLink]] = [[] for _ in pairs]
    engine = reader.engine
    if not isinstance(engine, TorchEngine) or not can_align(reader):
        return links
    prefix = len(reader.source_prefix)
    encoded = {}
    for number in sorted(range(len(pairs)), key=lambda number: len(pairs[number][1])):
        source, target = map(without_blank_ends, pairs[number])
        if source and target:
            read, written = encode_source(reader, source), encode_target(reader, target)
            longest = max(prefix + len(read["input_ids"]), len(written["input_ids"]))
            if longest <= engine.last_position:
                encoded[number] = read, written
    found = read_pairs(reader, engine, encoded.values())
    for number, (read, written, positions) in zip(encoded, found, strict=True):
        source, target = pairs[number]
        places = [_in_text(source, *offsets) for offsets in read["offset_mapping"]]
        for position, offsets in zip(positions, written["offset_mapping"], strict=True):
            token = _in_text(target, *offsets)
            if position >= prefix and token[0] < token[1]:
                links[number].append((*places[position - prefix], *token))
    return links


def _in_text(text: str, start: int, end: int) -> tuple[int, int]:
    """Place of a token, without blanks, in a text of which it knows that without blank ends."""
    before = len(blank_ends(text)[0])
    token = text[before + start : before + end]
    return before + end - len(token.lstrip()), before + start + len(token.rstrip())
