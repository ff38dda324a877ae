#!/usr/bin/env python
"""German number words and their English translations: a parallel corpus that needs no network.

German puts the units before the tens and writes a number as one word; English does neither:
"zweihundertfünfundvierzig" is "two hundred forty-five". A model has to split the word into its
parts and to swap two of them. So its cross-attention shows a crossing that a reader can check,
unlike copying or reversing digits. Every number has exactly one right translation, so exact match
is a fair score, and it is known for certain which numbers training never saw.

`make` writes the corpus, numbers from 0 to 999,999, as train, validation and test, each as .de and
.en. `score` counts exact translations of its test.de for each number of digits.

Examples:
  python scripts/number_words.py make data/numbers --train 40000
  python scripts/number_words.py score data/numbers runs/demo/test.en
"""

import argparse
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vanilla_transformer_tools.files import read_lines, write_lines

LARGEST_NUMBER = 999_999

# Shares of the numbers with a given number of digits that a split may draw from. They limit how
# many of the few short numbers training loses: of 1 to 9, two go to the test pool and one to the
# validation pool; of 10 to 99, eighteen and nine.
_TEST_SHARE = 0.2
_VALIDATION_SHARE = 0.1

_NUMBERS = (*range(21), *range(30, 100, 10), 100, 1000)
_GERMAN_WORDS = """null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn
vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig
siebzig achtzig neunzig hundert tausend"""
_ENGLISH_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty
ninety hundred thousand"""


@dataclass(frozen=True)
class _Language:
    """How a language forms numbers: its words, and what joins units and tens."""

    words: dict[int, str]
    joint: str
    has_units_first: bool


_GERMAN = _Language(dict(zip(_NUMBERS, _GERMAN_WORDS.split(), strict=True)), "und", True)
_ENGLISH = _Language(dict(zip(_NUMBERS, _ENGLISH_WORDS.split(), strict=True)), "-", False)


class DigitScore(NamedTuple):
    """Predictions that equal their reference, among numbers with as many digits."""

    digits: int
    exact: int
    lines: int


def german(number: int) -> str:
    """German word for a number, such as "einundzwanzigtausendeinundzwanzig".

    Hundreds and thousands always carry their count: "einhundert", "eintausend".
    """
    return "".join(german_parts(number))


def english(number: int) -> str:
    """English words for a number, such as "twenty-one thousand one hundred five"."""
    words = " ".join(english_parts(number))
    return words.replace(f" {_ENGLISH.joint} ", _ENGLISH.joint)


def german_parts(number: int) -> list[str]:
    """Parts of the German word, such as "fünf", "und", "vierzig"; see `german`."""
    parts = _parts(number, _GERMAN)
    if parts[-1] == _GERMAN.words[1]:
        parts[-1] = "eins"
    return parts


def english_parts(number: int) -> list[str]:
    """Parts of the English words, such as "forty", "-", "five"; see `english`."""
    return _parts(number, _ENGLISH)


def write_corpus(
    folder: Path | str,
    *,
    seed: int = 0,
    train: int = 40_000,
    validation: int = 500,
    test: int = 1_000,
) -> list[Path]:
    """Writes `train`, `validation` and `test` as `.de` and `.en`; returns the paths of all files.

    Line i of the two files is the same number; `test.numbers` holds the test split's numbers as
    digits. No number occurs twice, within a split or across splits. `test.parts.de` and
    `test.parts.en` have blanks between the parts of each number.

    Half of each split is drawn log-uniformly over the range, so that short numbers occur, and the
    other half uniformly, from the split's own pool: for each number of digits, the test pool has
    20 % of the numbers, the validation pool 10 %, and the training pool the rest and 0. Neither the
    pools nor the test split depend on the other sizes.

    Raises:
        ValueError: If a size is below 1 or above its pool; nothing is written then.
    """
    rng = random.Random(seed)
    pools = _pools(rng)
    sizes = {"test": test, "validation": validation, "train": train}
    faults = [
        f"`{split}` must be between 1 and {len(pools[split])} lines, got {size}. "
        "Choose a size in this range."
        for split, size in sizes.items()
        if not 1 <= size <= len(pools[split])
    ]
    if faults:
        raise ValueError("\n".join(faults))

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[Path, Iterable[str]] = {}
    for split, size in sizes.items():
        numbers = _draw(rng, pools[split], size)
        contents[folder / f"{split}.de"] = map(german, numbers)
        contents[folder / f"{split}.en"] = map(english, numbers)
        if split == "test":
            contents[folder / f"{split}.numbers"] = map(str, numbers)
            for language, parts in (("de", german_parts), ("en", english_parts)):
                lines = [" ".join(parts(number)) for number in numbers]
                contents[folder / f"{split}.parts.{language}"] = lines
    return [write_lines(path, lines) for path, lines in contents.items()]


def exact_match_by_digits(
    numbers: Sequence[int], predictions: Sequence[str], references: Sequence[str]
) -> list[DigitScore]:
    """Exact matches for each number of digits that occurs, in ascending order.

    Raises:
        ValueError: If numbers, predictions and references differ in length.
    """
    if not len(numbers) == len(predictions) == len(references):
        raise ValueError(
            "`numbers`, `predictions` and `references` must have one entry per line each, got "
            f"{len(numbers)}, {len(predictions)} and {len(references)}. Pass the same lines of all."
        )
    lengths = [len(str(number)) for number in numbers]
    lines = Counter(lengths)
    same = map(str.__eq__, predictions, references)
    exact = Counter(itertools.compress(lengths, same))
    return [DigitScore(digits, exact[digits], lines[digits]) for digits in sorted(lines)]


def _parts(number: int, language: _Language) -> list[str]:
    if not 0 <= number <= LARGEST_NUMBER:
        raise ValueError(
            f"`number` must be between 0 and {LARGEST_NUMBER}, got {number}. "
            "Larger and negative numbers have no words here."
        )
    for unit in (1000, 100):
        count, rest = divmod(number, unit)
        if count:
            counted = [*_parts(count, language), language.words[unit]]
            return counted + (_parts(rest, language) if rest else [])
    if number in language.words:
        return [language.words[number]]
    units = number % 10
    parts = [language.words[number - units], language.joint, language.words[units]]
    return parts[::-1] if language.has_units_first else parts


def _pools(rng: random.Random) -> dict[str, set[int]]:
    """Assigns every number to one split, in fixed shares for each number of digits."""
    test: set[int] = set()
    validation: set[int] = set()
    for digits in range(1, len(str(LARGEST_NUMBER)) + 1):
        # From 1, not 0: "null" occurs in no other word, so only its own line can teach it.
        numbers = range(10 ** (digits - 1), 10**digits)
        test_size = round(_TEST_SHARE * len(numbers))
        validation_size = round(_VALIDATION_SHARE * len(numbers))
        held_out = rng.sample(numbers, test_size + validation_size)
        test.update(held_out[:test_size])
        validation.update(held_out[test_size:])
    train = set(range(LARGEST_NUMBER + 1)) - test - validation
    return {"train": train, "validation": validation, "test": test}


def _draw(rng: random.Random, pool: set[int], size: int) -> list[int]:
    """Draws distinct numbers from a pool in random order, half of them log-uniformly."""
    drawn: set[int] = set()
    while len(drawn) < size // 2:
        # Shifted by one, because 0 has no logarithm.
        number = int(math.exp(rng.uniform(0, math.log(LARGEST_NUMBER + 2)))) - 1
        if number in pool:
            drawn.add(number)
    numbers = [*drawn, *rng.sample(sorted(pool - drawn), size - len(drawn))]
    rng.shuffle(numbers)
    return numbers


def main() -> int:
    """Writes the corpus or prints its scores; returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write the corpus")
    make.add_argument("folder", type=Path, help="where the files go; created if absent")
    for split, size in (("train", 40_000), ("validation", 500), ("test", 1_000)):
        text = f"size of the {split} split in lines (default: {size})"
        make.add_argument(f"--{split}", type=int, default=size, metavar="LINES", help=text)
    same = "the same seed and sizes give the same files (default: 0)"
    make.add_argument("--seed", type=int, default=0, help=same)
    score = commands.add_parser("score", help="count exact translations")
    score.add_argument("corpus", type=Path, help="folder of the corpus")
    score.add_argument("translations", type=Path, help="of its test.de, one per line")
    given = vars(parser.parse_args())
    if given.pop("command") == "make":
        for path in write_corpus(**given):
            print(f"{path}\t{given[path.name.partition('.')[0]]} lines")
        return 0
    corpus = given["corpus"]
    numbers = [int(line) for line in read_lines(corpus / "test.numbers")]
    lines = (list(read_lines(path)) for path in (given["translations"], corpus / "test.en"))
    scores = exact_match_by_digits(numbers, *lines)
    print("digits  exact  lines")
    for row in scores:
        print(f"{row.digits:6}  {row.exact:5}  {row.lines:5}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
