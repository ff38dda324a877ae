"""Training text in capitals and in title case, as Marian's `--all-caps-every` and the like have it.

Each pair has its turn in some epoch. Which ones are changed depends on the epoch and on places in
the corpus alone, so it is the same with any number of processes and after resuming.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.parallel_text import COLUMNS

# The first letter of a word; an apostrophe is inside of one.
_FIRST_LETTER = re.compile(r"(?<![\w'\u2019])\w")


def in_title_case(text: str) -> str:
    """The text with a capital at the beginning of each word; the other letters stay."""
    return _FIRST_LETTER.sub(lambda found: found[0].title(), text)


@dataclass(frozen=True)
class Casing:
    """Which pairs are changed, by their places in the corpus, and how.

    Attributes:
        all_caps_every: One of so many pairs is in capitals, on both sides; None: no pair.
        title_case_every: One of so many pairs has a source in title case; None: no pair.
        kept: Pattern of what stays as it is, such as symbols, in one group; None: nothing does.
    """

    all_caps_every: int | None = None
    title_case_every: int | None = None
    kept: re.Pattern[str] | None = None

    @classmethod
    def of_run(cls, settings: TrainSettings, symbols: Iterable[str]) -> Self | None:
        """That of the settings, which leaves symbols as they are; None if they change nothing."""
        longest_first = sorted(map(re.escape, symbols), key=len, reverse=True)
        kept = re.compile(f"({'|'.join(longest_first)})") if longest_first else None
        every = settings.all_caps_every, settings.title_case_every
        return cls(*every, kept) if any(every) else None

    def rows(self, pairs: int, epoch: int) -> list[int]:
        """Rows of the pairs that are changed in an epoch, in order."""
        both = (0, self.all_caps_every), (1, self.title_case_every)
        found = (range(-(epoch + shift) % every, pairs, every) for shift, every in both if every)
        return sorted(set().union(*found))

    def changed(self, text: str, side: str, place: int) -> str:
        """A text as it is trained on, if `side` is `source` or `target`; others are not changed.

        The place is the row of its pair plus the epoch; in a stream, the number of pairs before it.
        """
        change: Callable[[str], str] | None = None
        if self.all_caps_every and place % self.all_caps_every == 0 and side in COLUMNS[:2]:
            change = str.upper
        elif self.title_case_every and (place + 1) % self.title_case_every == 0:
            change = in_title_case if side == "source" else None
        if not (change and self.kept):
            return change(text) if change else text
        parts = self.kept.split(text)
        parts[::2] = map(change, parts[::2])
        return "".join(parts)

    def changed_pair(self, pair: Iterable[str], place: int) -> tuple[str, ...]:
        """Both texts of a pair; its tag, if there is one, stays."""
        sides = zip(COLUMNS, pair, strict=False)
        return tuple(self.changed(text, side, place) for side, text in sides)
