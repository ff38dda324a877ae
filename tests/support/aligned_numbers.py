"""Lines of number words whose translation runs backwards, with their exact word alignments.

"sieben zweiundvierzig" becomes "forty-two seven": whoever puts tags where they were is wrong.
"""

import random
from pathlib import Path

from number_words import english, german

# Numbers of a line.
FEWEST, MOST = 1, 4
NUMBERS = [*range(1, 31), 40, 52, 63, 74, 85, 96]


def numbers_of_line(rng: random.Random) -> list[int]:
    return [rng.choice(NUMBERS) for _ in range(rng.randint(FEWEST, MOST))]


def source_of_numbers(numbers: list[int]) -> str:
    return " ".join(map(german, numbers))


def target_of_numbers(numbers: list[int]) -> str:
    return " ".join(map(english, reversed(numbers)))


def alignment_of_numbers(numbers: list[int]) -> str:
    """In Pharaoh format, by the words between blanks; below 100 a number is one in both."""
    return " ".join(f"{place}-{len(numbers) - 1 - place}" for place in range(len(numbers)))


def write_aligned_corpus(folder: Path, *, seed: int = 0, **splits: int) -> None:
    """Writes `SPLIT.de`, `SPLIT.en` and `SPLIT.align` of so many lines each."""
    rng = random.Random(seed)
    for split, size in splits.items():
        lines = [numbers_of_line(rng) for _ in range(size)]
        sides = {"de": source_of_numbers, "en": target_of_numbers, "align": alignment_of_numbers}
        for suffix, of in sides.items():
            text = "".join(f"{of(numbers)}\n" for numbers in lines)
            (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")
