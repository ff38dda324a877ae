"""Ends of a text that no model reads."""

from vanilla_transformer.text_vanilla_transformer import (
    AT_ENDS,
    BLANKS,
    blank_ends,
    without_blank_ends,
)

__all__ = ["AT_ENDS", "blank_ends", "blanks_around", "without_blank_ends"]


def blanks_around(source: str) -> tuple[str, str]:
    """The ends that a translation gets from its source: its blanks, without controls and marks."""
    before, after = (
        "".join(character for character in end if character in BLANKS) for end in blank_ends(source)
    )
    return before, after
