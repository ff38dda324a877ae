"""The text of a run: its pairs, and the filters that drop some, for a reason that is recorded.

All filters work on raw text, before there is a vocabulary. Lengths are in characters, because many
scripts do not separate words by blanks.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.parallel_text import (
    COLUMNS,
    ROWS_AT_A_TIME,
    ParallelText,
    load_pairs,
    parallel_text,
    read_pairs,
    read_texts,
)

logger = logging.getLogger(__name__)

DROPPED_FILE = "dropped.jsonl"

# A language of one pair among as many as these is doubted.
_MANY_PAIRS = 100
# Doubted tags that a warning names.
_NAMED = 3

# Share of the validation pairs that training pairs may be without a warning.
_SHARE_OF_KNOWN = 0.1

# Takes source, target, and the tag if there is one, and says whether the pair is dropped. It is
# called once for each pair, in order. Workers that read a stream get a copy by pickle.
Rule = Callable[..., bool]


@dataclass(frozen=True)
class FilteredPairs:
    """A dataset after filtering: each pair is kept, or dropped by one filter.

    Attributes:
        read: All pairs.
        filters: Names of the filters, in the order in which they were applied.
        verdicts: For each pair 0 if it is kept, else the number of its filter, from 1.
    """

    read: Dataset
    filters: tuple[str, ...]
    verdicts: npt.NDArray[np.uint8]

    @property
    def kept(self) -> Dataset:
        """The pairs that no filter dropped, in the order of the file."""
        return self.read.select(np.flatnonzero(self.verdicts == 0)) if self.filters else self.read

    @property
    def dropped(self) -> dict[str, int]:
        """Number of pairs that each filter dropped; a pair counts for its first filter only."""
        counts = np.bincount(self.verdicts, minlength=1 + len(self.filters))
        return dict(zip(self.filters, counts[1:].tolist(), strict=True))

    def summary(self) -> Iterator[str]:
        """Human-readable table with a line for each filter; empty without filters."""
        if self.filters:
            dropped = sum(self.dropped.values())
            yield f"dropped     {dropped:,} of {len(self.read):,} pairs, see {DROPPED_FILE}"
        for name, count in self.dropped.items():
            yield f"            {count:>11,} {name}"

    def write_dropped(self, folder: Path) -> None:
        """Writes the dropped pairs to `dropped.jsonl`, unless there are no filters.

        Each line is an object: `line` (the number of the pair, from 1, over all files of the
        corpus), `filter`, `source`, `target`, and `tag` if the pairs have one.
        """
        if self.filters:
            rows = np.flatnonzero(self.verdicts)
            records = (
                {"line": row + 1, "filter": self.filters[self.verdicts[row] - 1]}
                | dict(zip(COLUMNS, pair, strict=False))
                for row, pair in zip(rows.tolist(), _pairs_of(self.read.select(rows)), strict=True)
            )
            lines = (json.dumps(record, ensure_ascii=False) for record in records)
            write_lines(folder / DROPPED_FILE, lines)


@dataclass(frozen=True)
class Corpus:
    """The text of a run.

    Attributes:
        filtered: Training pairs; of a stream only the first ones.
        validation: Validation pairs; None without any.
        read: Begins a pass over the training pairs, which a stream does again and again.
    """

    filtered: FilteredPairs
    validation: Dataset | None
    read: Callable[[], Iterator[tuple[str, ...]]]


def read_corpus(settings: TrainSettings) -> Corpus:
    """Reads and filters the pairs of a run.

    Raises:
        ValueError: If the pairs cannot be read, or the filters drop all.
        OSError: If a file cannot be read.
    """
    validation = None
    if settings.validation:
        text = parallel_text(settings, settings.validation, settings.validation_split)
        validation = load_pairs(text)
    rules = drop_rules(settings, validation)
    text = parallel_text(settings, settings.train, settings.train_split)
    # Of a stream only what the tokenizer learns from is stored.
    pairs = load_pairs(text, settings.tokenizer_pairs if settings.streaming else None)
    filtered = filter_pairs(pairs, rules)
    warn_of_single_tags(filtered)
    if validation is not None:
        warn_of_known_pairs(filtered.kept, validation)
    return Corpus(filtered, validation, partial(_read_kept, text, rules))


def _read_kept(text: ParallelText, rules: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    """One pass over the pairs that no filter drops, with their tags if there are any."""
    for pair in read_pairs(text):
        if not any(drops(*pair) for drops in rules.values()):
            yield pair


def filter_pairs(pairs: Dataset, rules: Mapping[str, Rule]) -> FilteredPairs:
    """Applies the rules of `drop_rules` to each pair; the first one that drops it is its filter.

    The pairs are read in batches: besides the rules' data, one byte per pair is in memory.

    Raises:
        ValueError: If no pair is left.
    """
    verdicts = np.zeros(len(pairs), np.uint8)
    result = FilteredPairs(pairs, tuple(rules), verdicts)
    if rules:
        numbered = list(enumerate(rules.values(), start=1))
        for row, pair in enumerate(_pairs_of(pairs)):
            verdicts[row] = next((n for n, drops in numbered if drops(*pair)), 0)
    if verdicts.all():
        counts = ", ".join(f"{name} {count:,}" for name, count in result.dropped.items() if count)
        raise ValueError(
            f"The filters must leave at least one pair, got all {len(pairs):,} dropped: {counts}. "
            "Change or leave out the filter that drops the most."
        )
    return result


def _pairs_of(pairs: Dataset) -> Iterator[tuple[str, ...]]:
    names = [name for name in COLUMNS if name in pairs.column_names]
    for table in pairs.with_format("arrow").iter(ROWS_AT_A_TIME):
        yield from zip(*(table[name].to_pylist() for name in names), strict=True)


def drop_rules(settings: TrainSettings, validation: Dataset | None) -> dict[str, Rule]:
    """The filters that `settings` ask for, by the names of their options without `filter_`.

    All but `duplicates` look at one pair only, and `duplicates` comes last. So the kept pairs do
    not depend on the order, which only decides which filter a pair counts for. `filter_overlap`
    also compares with the validation pairs.

    Raises:
        OSError: If a file of `filter_overlap` cannot be read.
    """
    rules: dict[str, Rule] = {}
    if settings.filter_empty:
        rules["empty"] = _has_empty_side
    if settings.filter_identical:
        rules["identical"] = _has_equal_sides
    if (most := settings.filter_max_characters) is not None:
        rules["max_characters"] = partial(_is_longer, most)
    if (ratio := settings.filter_max_ratio) is not None:
        rules["max_ratio"] = partial(_differs_in_length, ratio)
    if settings.filter_overlap is not None:
        keys = {_comparable(text) for text in _evaluation_texts(settings, validation)} - {""}
        rules["overlap"] = partial(_has_known_side, keys)
    if settings.filter_duplicates:
        rules["duplicates"] = _seen_before()
    return rules


def warn_of_single_tags(filtered: FilteredPairs) -> None:
    """Doubts tags of one pair among many: with a tab too many, a word stands where a tag should."""
    if "tag" not in filtered.read.column_names:
        return
    rows = np.flatnonzero(filtered.verdicts == 0)
    tags = filtered.read["tag"][:]
    counts = Counter(tags[row] for row in rows)
    places = [f"{tags[row]!r} (line {row + 1:,})" for row in rows if counts[tags[row]] == 1]
    if places and len(rows) >= _MANY_PAIRS:
        logger.warning(
            "--tag_column must hold languages, each of many pairs; of %s pairs, got %d tags of one "
            "pair only: %s. If that is no language, correct the line, which may have a tab too "
            "many, or take it out.",
            f"{len(rows):,}",
            len(places),
            ", ".join(places[:_NAMED]) + ", ..." * (len(places) > _NAMED),
        )


def warn_of_known_pairs(training: Dataset, validation: Dataset) -> None:
    """Doubts validation pairs of which many are training pairs: learned by heart, they score high.

    A few are everywhere, such as greetings.
    """
    held = {pair[:2] for pair in _pairs_of(validation)}
    share = len(held.intersection(pair[:2] for pair in _pairs_of(training))) / len(held)
    if share >= _SHARE_OF_KNOWN:
        logger.warning(
            "--validation should hold other pairs than --train, which has %.0f %% of them: their "
            "scores say little about new text. --filter_overlap takes them out of --train.",
            100 * share,
        )


def _has_empty_side(source: str, target: str, *tag: str) -> bool:
    return not (source.strip() and target.strip())


def _has_equal_sides(source: str, target: str, *tag: str) -> bool:
    return source == target


def _is_longer(most: int, source: str, target: str, *tag: str) -> bool:
    return max(len(source), len(target)) > most


def _differs_in_length(ratio: float, source: str, target: str, *tag: str) -> bool:
    shorter, longer = sorted((len(source), len(target)))
    return longer > ratio * shorter


def _has_known_side(keys: set[str], source: str, target: str, *tag: str) -> bool:
    """Whether a side is one of the texts of all evaluation sets.

    Both sides are compared, because either one spoils a score: a model trained on the source has
    also seen its translation, and one trained on the reference may repeat it for similar sources.
    Each side is compared with all texts, because one file may hold pairs of several directions.
    """
    return _comparable(source) in keys or _comparable(target) in keys


def _comparable(text: str) -> str:
    """Text without case, white space and compatibility forms (definition D146 of Unicode).

    Normalising may yield letters that must still be folded (`№` yields `No`), and folding may yield
    text that must still be normalised, so each is done twice.
    """
    folded = unicodedata.normalize("NFD", text).casefold()
    folded = unicodedata.normalize("NFKC", folded).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def _evaluation_texts(settings: TrainSettings, validation: Dataset | None) -> Iterator[str]:
    if validation is not None:
        for source, target, *_ in _pairs_of(validation):
            yield from (source, target)
    for path in settings.filter_overlap or ():
        yield from read_texts(parallel_text(settings, [path], settings.train_split))


def _seen_before() -> Rule:
    """Drops pairs that equal an earlier one, character by character: both sides, and the tag.

    A hash of 128 bits is stored for each pair, which takes about 100 bytes of memory. Among a
    billion different pairs, two share a hash with a probability of about 10^-21.
    """
    seen: set[int] = set()

    def drops(*pair: str) -> bool:
        # The separator is a byte that does not occur in UTF-8.
        content = b"\xff".join(text.encode() for text in pair)
        digest = int.from_bytes(blake2b(content, digest_size=16).digest())
        is_new = digest not in seen
        seen.add(digest)
        return not is_new

    return drops
