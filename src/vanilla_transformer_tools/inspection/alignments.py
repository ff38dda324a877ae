"""Word alignments that a model's cross-attention implies, and their error rate."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.units import units_of_tokens
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.read_pairs import encode_pair, read_pairs

# Position of a unit in the source and of one in the target, both counted from 0.
Link = tuple[int, int]

_GOLD_LINK = re.compile(r"(\d+)([-?])(\d+)")


@dataclass(frozen=True)
class GoldAlignment:
    """The reference alignment of one pair, made by a person or a rule.

    Attributes:
        sure: Links that must be there.
        possible: Links that may be there, the sure ones included.
    """

    sure: frozenset[Link]
    possible: frozenset[Link]

    @classmethod
    def parse(cls, line: str) -> Self:
        """Reads sure links such as `0-0` and possible ones such as `1?2`, separated by blanks.

        Raises:
            ValueError: If the line holds anything else.
        """
        sure, possible = set(), set()
        for word in line.split():
            match = _GOLD_LINK.fullmatch(word)
            if not match:
                raise ValueError(
                    "A gold link must be source-target for a sure one, or source?target for a "
                    f"possible one, counted from 0, such as 3-4 or 3?4, got {word!r}."
                )
            link = int(match[1]), int(match[3])
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        return cls(frozenset(sure), frozenset(possible))


@dataclass(frozen=True)
class WordAlignment:
    """Which words of a pair belong together.

    Attributes:
        links: Source and target, in order.
        sizes: Number of words of the source, and of the target.
    """

    links: tuple[Link, ...]
    sizes: tuple[int, int]

    def __str__(self) -> str:
        """In Pharaoh format, such as `0-0 1-2`: source and target, counted from 0."""
        return " ".join(f"{source}-{target}" for source, target in self.links)


@dataclass(frozen=True)
class AlignmentScore:
    """How well links agree with gold ones, over all pairs (Och & Ney 2003, section 5).

    Attributes:
        error_rate: 1 - (|A and S| + |A and P|) / (|A| + |S|); links A, sure S and possible P.
        precision: Share of the links that are possible gold links.
        recall: Share of the sure gold links that were found.
    """

    error_rate: float
    precision: float
    recall: float

    def __str__(self) -> str:
        return (
            f"AER {self.error_rate:.1%}, precision {self.precision:.1%}, recall {self.recall:.1%}"
        )


def read_gold(path: str | os.PathLike[str]) -> list[GoldAlignment]:
    """Reads a file with one gold alignment per line, see `GoldAlignment.parse`.

    Raises:
        ValueError: If a line holds something else.
    """
    gold = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            gold.append(GoldAlignment.parse(line))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r}, line {number}: {error}") from error
    return gold


def align_words(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    units: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Iterator[WordAlignment]:
    """Links the words of pairs of lines by the model's attention while it reads the pair.

    The words of a target token and of the source token it attends to most (see
    `TorchEngine.force`) are linked.

    Args:
        translator: With the torch engine and fast tokenizers, which know the place of each token.
        sources: Lines.
        targets: Their translations.
        units: Words to align: sources and targets once more, with blanks between the units,
            such as segmented Chinese text. None: words are separated by blanks.

    Returns:
        The alignment of each pair, in order.

    Raises:
        ValueError: If the engine cannot read pairs, a tokenizer is not fast, the sides have
            different numbers of lines, or units do not spell the text of their line.
    """
    engine = translator.engine
    if not isinstance(engine, TorchEngine):
        raise ValueError(
            "Alignments need the engine 'torch', which can read a given translation, got "
            f"{type(engine).__name__}."
        )
    for tokenizer in (translator.tokenizer, translator.target_tokenizer):
        if not tokenizer.is_fast:
            raise ValueError(
                "Alignments need a fast tokenizer, which knows the place of each token in the "
                f"text, got {type(tokenizer).__name__}."
            )
    # As the model was trained.
    sources, targets = (list(map(without_blank_ends, lines)) for lines in (sources, targets))
    columns = [sources, targets, *(units or (sources, targets))]
    if len(set(map(len, columns))) > 1:
        raise ValueError(
            "Sources, targets and their units must have the same number of lines, got "
            f"{', '.join(str(len(column)) for column in columns)}. Check that they belong together."
        )
    tag: list[set[int]] = [set() for _ in translator.tokenizers.source_prefix]
    rows = list(zip(*columns, strict=True))
    encoded = (encode_pair(translator.tokenizers, *row[:2]) for row in rows)
    read = read_pairs(translator.tokenizers, engine, encoded)
    for lines, (source, target, positions) in zip(rows, read, strict=True):
        source_words = tag + units_of_tokens(source["offset_mapping"], lines[0], lines[2])
        target_words = units_of_tokens(target["offset_mapping"], lines[1], lines[3])
        links = {
            (source_word, target_word)
            for position, words in zip(positions, target_words, strict=True)
            for target_word in words
            for source_word in source_words[position]
        }
        sizes = len(lines[2].split()), len(lines[3].split())
        yield WordAlignment(tuple(sorted(links)), sizes)


def score_alignments(
    alignments: Sequence[WordAlignment], gold: Sequence[GoldAlignment]
) -> AlignmentScore:
    """Compares the links of all pairs together with the gold links.

    Args:
        alignments: One for each pair.
        gold: One for each pair.

    Raises:
        ValueError: If a pair has no gold alignment, or one links words that do not exist.
    """
    if len(alignments) != len(gold):
        raise ValueError(
            f"There must be one gold alignment for each of the {len(alignments):,} pairs, got "
            f"{len(gold):,}. Check that they belong to the same file."
        )
    all_links = sure = possible_found = sure_found = 0
    for number, (alignment, truth) in enumerate(zip(alignments, gold, strict=True), start=1):
        sources, targets = alignment.sizes
        for source, target in sorted(truth.possible):
            if source >= sources or target >= targets:
                raise ValueError(
                    f"A gold link of pair {number} must be among its {sources} source and "
                    f"{targets} target words, counted from 0, got {source}-{target}. Check that "
                    "the file counts from 0, and that it splits the lines into the same words."
                )
        links = set(alignment.links)
        all_links += len(links)
        sure += len(truth.sure)
        sure_found += len(links & truth.sure)
        possible_found += len(links & truth.possible)
    return AlignmentScore(
        error_rate=1 - (sure_found + possible_found) / (all_links + sure)
        if all_links + sure
        else 0.0,
        precision=possible_found / all_links if all_links else 1.0,
        recall=sure_found / sure if sure else 1.0,
    )
