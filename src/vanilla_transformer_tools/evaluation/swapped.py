"""Test pairs whose languages are swapped, by the words that a model knows from its sources."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

# Field of a run's record with its most frequent source words.
SOURCE_WORDS = "frequent_source_words"
_MOST_WORDS = 100


def frequent_words(lines: Sequence[str]) -> list[str]:
    """The words that are in at least one of a hundred lines, 100 at most: articles and the like."""
    counts = Counter(word for line in lines for word in set(line.split()))
    return [word for word, count in counts.most_common(_MOST_WORDS) if count * 100 >= len(lines)]


def warning_of_swapped(
    sources: Sequence[str], references: Sequence[str], record: Mapping[str, Any]
) -> str:
    """A question for the user if the references have more of the source words of a run's record."""
    known = set(record.get(SOURCE_WORDS, ()))
    shares = []
    for lines in (sources, references):
        words = [word for line in lines for word in line.split()]
        shares.append(sum(word in known for word in words) / max(len(words), 1))
    if shares[1] < 0.1 or shares[1] < 2 * shares[0]:
        return ""
    return (
        f"Are the languages swapped? Frequent words of the training sources are {shares[0]:.0%} of "
        f"the words of the sources, and {shares[1]:.0%} of those of the references. "
        "If they are, give the two files in the other order."
    )
