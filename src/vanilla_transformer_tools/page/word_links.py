"""Which parts of a line belong to which parts of its translation, and how a page draws that."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from transformers import BatchEncoding

from vanilla_transformer_tools.inspection.alignments import (
    Link,
    align_words,
    encode_source,
    encode_target,
)
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.translation import Translator

# A character of a script that puts no blanks between words.
WITHOUT_BLANKS = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f]"
)


@dataclass(frozen=True)
class LinkedPair:
    """A line and its translation in parts, and which of them belong together.

    Attributes:
        source: Parts of the line.
        target: Parts of its translation.
        links: Places of a part of the line and of one of its translation, counted from 0.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: tuple[Link, ...]


def link_parts(
    translator: Translator, sources: Sequence[str], targets: Sequence[str]
) -> list[LinkedPair]:
    """Links words, as `align_words` does; text without blanks is taken by its tokens.

    Args:
        translator: Translator with the torch engine and fast tokenizers.
        sources: Lines, none of them blank.
        targets: Their translations.

    Raises:
        ValueError: If a tokenizer does not know the places of its tokens.
    """
    # `align_words` reads them without blank ends, too.
    sources, targets = (list(map(without_blank_ends, lines)) for lines in (sources, targets))
    parts = [
        (_parts(source, encode_source(translator, source)), _parts(target, encoded))
        for source, target in zip(sources, targets, strict=True)
        for encoded in [encode_target(translator, target)]
    ]
    units = [" ".join(source) for source, _ in parts], [" ".join(target) for _, target in parts]
    alignments = align_words(translator, sources, targets, units)
    return [
        LinkedPair(source, target, alignment.links)
        for (source, target), alignment in zip(parts, alignments, strict=True)
    ]


def links_html(pairs: Sequence[LinkedPair]) -> str:
    """Lines above their translations; the page's script draws what links them."""
    return "".join(map(_linked, pairs))


def _linked(pair: LinkedPair) -> str:
    rows = []
    for side, word in enumerate(("to", "from")):
        parts, others = (pair.source, pair.target)[:: 1 - 2 * side]
        items = []
        for place, part in enumerate(parts):
            linked = [link[1 - side] for link in pair.links if link[side] == place]
            label = f"{part}, {word} {', '.join(others[other] for other in linked) or 'nothing'}"
            items.append(
                f'<li tabindex="0" aria-label="{escape(label)}" '
                f'data-links="{" ".join(map(str, linked))}"><bdi>{escape(part)}</bdi></li>'
            )
        direction = "rtl" if runs_from_right(" ".join(parts)) else "ltr"
        rows.append(f'<ul dir="{direction}">{"".join(items)}</ul>')
    return f"<word-links>{''.join(rows)}</word-links>"


def runs_from_right(text: str) -> bool:
    """Whether the first letter is of a script that runs from right to left."""
    kinds = map(unicodedata.bidirectional, text)
    return next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"


def _parts(text: str, encoding: BatchEncoding) -> tuple[str, ...]:
    """Words, or the tokens of a text that is a single word or has words without blanks."""
    words = text.split()
    if len(words) != 1 and not WITHOUT_BLANKS.search(text):
        return tuple(words)
    parts: list[str] = []
    last = 0
    for _, end in encoding.get("offset_mapping", []):
        # The bytes of one character have the same place.
        if end > last:
            parts += text[last:end].split()
            last = end
    return (*parts, *text[last:].split())
