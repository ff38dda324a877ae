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
    words = (text if units is None else units).split()
    if "".join(words) != "".join(text.split()):
        raise ValueError(
            f"Units must spell their line, apart from blanks: expected {text!r}, got {units!r}."
        )
    numbers = chain.from_iterable([number] * len(word) for number, word in enumerate(words))
    units_of = [None if character.isspace() else next(numbers) for character in text]
    return [{one for one in units_of[start:end] if one is not None} for start, end in offsets]
