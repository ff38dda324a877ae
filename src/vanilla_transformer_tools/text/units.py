"""Which words of a line the tokens of its text belong to."""

from collections.abc import Iterable
from itertools import chain


def units_of_tokens(
    offsets: Iterable[tuple[int, int]], text: str, units: str | None = None
) -> list[set[int]]:
    """Numbers of the units whose characters each token has; none for blanks and `</s>`.

    Args:
        offsets: Beginning and end of each token in the text.
        text: Of the line.
        units: The text with blanks between the units; None: its words are separated by blanks.

    Raises:
        ValueError: If the units spell a different text.
    """
    numbers = _units_of_characters(text, text if units is None else units)
    return [
        {number for number in numbers[start:end] if number is not None} for start, end in offsets
    ]


def _units_of_characters(text: str, units: str) -> list[int | None]:
    """Number of the unit of each character of a text, None for its blanks.

    Raises:
        ValueError: If the units spell a different text.
    """
    words = units.split()
    if "".join(words) != "".join(text.split()):
        raise ValueError(
            f"Units must spell their line, apart from blanks: expected {text!r}, got {units!r}."
        )
    numbers = chain.from_iterable([number] * len(word) for number, word in enumerate(words))
    return [None if character.isspace() else next(numbers) for character in text]
