"""Which parts of a line belong to which parts of its translation."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import BatchEncoding

from vanilla_transformer_tools.inspection.alignments import Link, align_words
from vanilla_transformer_tools.text.blanks import UNBLANKED, without_blank_ends
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.read_pairs import encode_source, encode_target

_UNBLANKED = re.compile(f"[{UNBLANKED}]")


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

    def linked(self) -> list[tuple[str, str | None]]:
        """The parts of the translation, each with the parts of the line that it is linked to."""
        of_part: list[list[str]] = [[] for _ in self.target]
        for source, target in self.links:
            of_part[target].append(self.source[source])
        return [
            (part, " ".join(linked)) if linked else (f"{part} ", None)
            for part, linked in zip(self.target, of_part, strict=True)
        ]


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
        (
            _parts(source, encode_source(translator.tokenizers, source)),
            _parts(target, encode_target(translator.tokenizers, target)),
        )
        for source, target in zip(sources, targets, strict=True)
    ]
    units = [" ".join(source) for source, _ in parts], [" ".join(target) for _, target in parts]
    alignments = align_words(translator, sources, targets, units)
    return [
        LinkedPair(source, target, alignment.links)
        for (source, target), alignment in zip(parts, alignments, strict=True)
    ]


def runs_from_right(text: str) -> bool:
    """Whether the first letter is of a script that runs from right to left."""
    kinds = map(unicodedata.bidirectional, text)
    return next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L"


def _parts(text: str, encoding: BatchEncoding) -> tuple[str, ...]:
    """Words, or the tokens of a text that is a single word or has words without blanks."""
    words = text.split()
    if len(words) != 1 and not _UNBLANKED.search(text):
        return tuple(words)
    parts: list[str] = []
    last = 0
    for _, end in encoding.get("offset_mapping", []):
        # The bytes of one character have the same place.
        if end > last:
            parts += text[last:end].split()
            last = end
    return (*parts, *text[last:].split())
