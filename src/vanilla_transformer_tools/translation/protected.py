# ruff: noqa: RUF001
"""Text that a translation must keep from its source: placeholders, addresses, emoji, numbers."""

from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from typing import cast

import regex
from transformers import PreTrainedTokenizerBase

from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

_PATTERNS = {
    "urls": r"""(?:(?:https?|ftp)://|\bwww\.)[^\s<>"]*[^\s<>"'.,;:!?)\]}»”]""",
    "emails": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
    # printf, Python, ICU, templates; and a symbol that the text spells itself.
    "placeholders": r"%(?:\d+\$|\(\w+\))?[-+#0]*\d*(?:\.\d+)?(?:hh?|ll?|[Lzjt])?[diouxXeEfFgGcs@]"
    r"(?!\w)|%%|%\w+%|\{\{[^{}]{0,100}\}\}|\$?\{[^{}]{0,100}\}|<ph\d*>",
    "emoji": r"\p{RI}{2}|[0-9#*]\uFE0F?\u20E3"
    r"|\p{ExtPict}[\p{EMod}\uFE0F]?(?:\u200D\p{ExtPict}[\p{EMod}\uFE0F]?)*",
    "numbers": r"(?<!\w)[-+−]?\d+(?:[.,:\u202f'’]\d+)*(?!\w)",
}
# Of a model that was trained with symbols.
_USUAL = ("placeholders", "urls", "emails", "emoji")


def kinds_of(protect: str | None, symbols: Sequence[str]) -> tuple[str, ...]:
    """The kinds that `protect` names; None: the usual ones, if there are symbols for them.

    Raises:
        ValueError: If there is no such kind.
    """
    if protect is None:
        return _USUAL if symbols else ()
    kinds = tuple(protect.split(",")) if protect != "none" else ()
    if unknown := [kind for kind in kinds if kind not in _PATTERNS]:
        raise ValueError(
            f"`protect` must be none, or some of {','.join(_PATTERNS)}, separated by commas, got "
            f"{unknown[0]!r:.60}."
        )
    return kinds


def find_items(text: str, kinds: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Beginning and end of each item of these kinds in a text, in order."""
    if kinds:
        # An address comes before the placeholders and numbers in it.
        pattern = "|".join(one for kind, one in _PATTERNS.items() if kind in kinds)
        for found in regex.finditer(pattern, text):
            yield found.span()


def symbols_of(tokenizers: TokenizerPair) -> list[str]:
    """Symbols that stand for items: `<ph1>`, `<ph2>` and so on, or `<ph>`, if a model has them."""

    def is_known(symbol: str) -> bool:
        return all(_has(side, symbol) for side in (tokenizers.source, tokenizers.target))

    numbered = list(takewhile(is_known, (f"<ph{number}>" for number in count(1))))
    return numbered or list(filter(is_known, ["<ph>"]))


def _has(tokenizer: PreTrainedTokenizerBase, symbol: str) -> bool:
    token_id = cast(int | None, tokenizer.convert_tokens_to_ids(symbol))
    return token_id is not None and token_id != tokenizer.unk_token_id


def symbols_for(items: Sequence[str], symbols: Sequence[str]) -> dict[str, str]:
    """The symbol of each different item, by order; the last ones have none if symbols run out."""
    different = list(dict.fromkeys(items))
    if list(symbols) == ["<ph>"]:
        return dict.fromkeys(different, "<ph>")
    return dict(zip(different, symbols, strict=False))
