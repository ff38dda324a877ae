# ruff: noqa: RUF001
"""Lines with marks, which follow their words, and items such as addresses that stay."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile

import regex

from vanilla_transformer_tools.text.blanks import blank_ends, without_blank_ends
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation.engines import Engine, TorchEngine
from vanilla_transformer_tools.translation.placing import (
    CharacterLink,
    MarkedPiece,
    Placing,
    Span,
    is_around,
)
from vanilla_transformer_tools.translation.read_pairs import encode_pair, read_pairs
from vanilla_transformer_tools.translation.results import Piece, Translation, with_alternatives
from vanilla_transformer_tools.translation.segments import without_surrogates

_PATTERNS = {
    "urls": r"""(?:(?:https?|ftp)://|\bwww\.)[^\s<>"]*[^\s<>"'.,;:!?)\]}»”]""",
    "emails": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
    # printf, Python, ICU, templates; and a symbol that the text spells itself.
    "placeholders": r"%(?:\d+\$|\(\w+\))?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[Lzjt])?[diouxXeEfFgGcs@]"
    r"(?!\w)|%%|%\w+%|\{\{[^{}]{0,100}\}\}|\$?\{[^{}]{0,100}\}|<ph\d*>",
    "emoji": r"\p{RI}{2}|[0-9#*]\uFE0F?\u20E3"
    r"|\p{ExtPict}[\p{EMod}\uFE0F]?(?:\u200D\p{ExtPict}[\p{EMod}\uFE0F]?)*",
    "numbers": r"(?<!\w)[-+−]?\d+(?:[.,:\u202f'’]\d+)*(?!\w)",
}
# Of a model that was trained with symbols.
_USUAL = ("placeholders", "urls", "emails", "emoji")


def with_items(
    line: MarkedPiece, kinds: Sequence[str] = (), symbols: Sequence[str] = ()
) -> MarkedPiece:
    """A line as the model gets it, with the items that stay.

    Args:
        line: A line, which may have spans.
        kinds: Kinds of items that stay, see `find_items`, besides those that are marked.
        symbols: See `symbols_for`.
    """
    text = without_surrogates(line.text)
    kept = [span for span in line.spans if span.kept is not None]
    edges = {edge for span in line.spans for edge in (span.start, span.end)}
    items = [
        Span(start, end, kept=line.escaped(text[start:end]))
        for start, end in find_items(text, kinds)
        if all(span.end <= start or end <= span.start for span in kept)
        and not any(start < edge < end for edge in edges)
    ]
    return _with_symbols(replace(line, text=text, spans=[*line.spans, *items]), symbols)


def _with_symbols(line: MarkedPiece, symbols: Sequence[str]) -> MarkedPiece:
    """The line with symbols in place of items."""
    kept = sorted((span for span in line.spans if span.kept), key=lambda span: span.start)
    chosen = symbols_for([line.text[span.start : span.end] for span in kept], symbols)
    parts, ends, moves = [], [], [0]
    last = 0
    for span in kept:
        item = line.text[span.start : span.end]
        symbol = chosen.get(item, item)
        parts += [line.text[last : span.start], symbol]
        last = span.end
        ends.append(last)
        moves.append(moves[-1] + len(symbol) - len(item))

    def moved(place: int) -> int:
        return place + moves[bisect_right(ends, place)]

    text = "".join([*parts, line.text[last:]])
    moved_spans = [
        replace(span, start=moved(span.start), end=moved(span.end)) for span in line.spans
    ]
    return replace(line, text=text, spans=moved_spans)


def marked_pieces(line: MarkedPiece, parts: Sequence[Piece]) -> list[MarkedPiece]:
    """The pieces of a line: its parts, joined where an item would be cut.

    Args:
        line: The line with all its spans.
        parts: Parts that together are its text; none of a blank line.
    """
    pieces: list[MarkedPiece] = []
    waiting = deque(sorted(line.spans, key=lambda span: span.start))
    near: list[Span] = []
    joined: list[Piece] = []
    start = end = 0
    for part in parts:
        joined.append(part)
        end += len(part.text)
        while waiting and waiting[0].start <= end:
            near.append(waiting.popleft())
        if any(span.kept is not None and span.start < end < span.end for span in near):
            continue
        inside = [_part_of(span, start, end, end == len(line)) for span in near]
        spans = [span for span in inside if span]
        pieces.append(MarkedPiece(line.text[start:end], spans, joined, line.is_html))
        near = [span for span in near if span.end >= end]
        joined, start = [], end
    return pieces or [line]


def _part_of(span: Span, start: int, end: int, is_last: bool) -> Span | None:
    """The part of a span in a piece of the line: its marks are in each of them."""
    if span.start == span.end:
        is_inside = start <= span.start < end or (is_last and span.start == end)
    else:
        is_inside = span.start < end and start < span.end
    part = replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
    return part if is_inside else None


def place_marks(
    pieces: Sequence[MarkedPiece],
    translations: Sequence[Translation],
    tokenizers: TokenizerPair,
    engine: Engine,
) -> Iterator[tuple[Translation, int]]:
    """Translations with the marks and items of their pieces, and how many of the best one's lacked.

    Args:
        pieces: In order.
        translations: Of each.
        tokenizers: Tokenizers of both.
        engine: Engine whose attention links words, if it can.
    """
    wanted = []
    for piece, best in zip(pieces, translations, strict=True):
        if any(span.kept or not is_around(span, piece.text) for span in piece.spans):
            wanted += [(piece.text, one.text) for one in best.ranked]
    links = dict(zip(wanted, character_links(wanted, tokenizers, engine), strict=True))
    for piece, best in zip(pieces, translations, strict=True):
        if not (piece.spans or piece.is_html):
            yield best, 0
            continue
        ranked, missing = [], []
        for one in best.ranked:
            placing = Placing(piece, one.text, links.get((piece.text, one.text), []))
            ranked.append(replace(one, text=placing.text))
            missing.append(placing.missing)
        yield with_alternatives(ranked), missing[0]


def can_align(tokenizers: TokenizerPair, engine: Engine) -> bool:
    """Whether marks can follow their words: the engine shows attention, tokenizers know places."""
    is_fast = tokenizers.source.is_fast and tokenizers.target.is_fast
    return is_fast and isinstance(engine, TorchEngine)


def character_links(
    pairs: Sequence[tuple[str, str]], tokenizers: TokenizerPair, engine: Engine
) -> list[list[CharacterLink]]:
    """Links between the characters of texts and of their translations, by the model's attention.

    Returns:
        The links of each pair, in order; none if nothing can be aligned.
    """
    links: list[list[CharacterLink]] = [[] for _ in pairs]
    if not can_align(tokenizers, engine) or not isinstance(engine, TorchEngine):
        return links
    prefix = len(tokenizers.source_prefix)
    encoded = {}
    for number in sorted(range(len(pairs)), key=lambda number: len(pairs[number][1])):
        source, target = map(without_blank_ends, pairs[number])
        if source and target:
            read, written = encode_pair(tokenizers, source, target)
            longest = max(prefix + len(read["input_ids"]), len(written["input_ids"]))
            if longest <= engine.last_position:
                encoded[number] = read, written
    found = read_pairs(tokenizers, engine, encoded.values())
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


def kinds_of(protect: str | None, symbols: Sequence[str]) -> tuple[str, ...]:
    """The kinds that `protect` names; None: the usual ones, if there are symbols for them.

    Raises:
        ValueError: If there is no such kind.
    """
    if protect is None:
        return _USUAL if symbols else ()
    kinds = tuple(protect.split(",")) if protect != "none" else ()
    if unknown := [kind for kind in kinds if kind not in _PATTERNS]:
        raise ValueError(
            f"`protect` must be none, or some of {','.join(_PATTERNS)}, separated by commas, got "
            f"{unknown[0]!r:.60}."
        )
    return kinds


def find_items(text: str, kinds: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Beginning and end of each item of these kinds in a text, in order."""
    if kinds:
        # An address comes before the placeholders and numbers in it.
        pattern = "|".join(one for kind, one in _PATTERNS.items() if kind in kinds)
        for found in regex.finditer(pattern, text):
            yield found.span()


def symbols_of(tokenizers: TokenizerPair) -> list[str]:
    """Symbols that stand for items: `<ph1>`, `<ph2>` and so on, or `<ph>`, if a model has them."""

    def is_known(symbol: str) -> bool:
        return all(
            side.convert_tokens_to_ids(symbol) not in (None, side.unk_token_id)
            for side in (tokenizers.source, tokenizers.target)
        )

    numbered = list(takewhile(is_known, (f"<ph{number}>" for number in count(1))))
    return numbered or list(filter(is_known, ["<ph>"]))


def symbols_for(items: Sequence[str], symbols: Sequence[str]) -> dict[str, str]:
    """The symbol of each different item, by order; the last ones have none if symbols run out."""
    different = list(dict.fromkeys(items))
    if list(symbols) == ["<ph>"]:
        return dict.fromkeys(different, "<ph>")
    return dict(zip(different, symbols, strict=False))
