"""White space and invisible characters around a text, which no model reads."""

# Marks that are not seen count as white space at the ends of a text: U+FEFF is what `cat` puts
# between two files with a byte order mark.
BLANKS = "".join(
    [
        *(chr(code) for code in range(0x3001) if chr(code).isspace()),
        *("\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\u2060", "\ufeff"),
    ]
)
# Inside of a pattern's brackets: the characters of scripts that put no blanks between words.
UNBLANKED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003134f"
)


def without_blank_ends(text: str) -> str:
    """The text without white space and invisible characters at its ends."""
    return text.strip(BLANKS)


def blank_ends(text: str) -> tuple[str, str]:
    """What `without_blank_ends` takes away: at the beginning, and at the end."""
    rest = text.lstrip(BLANKS)
    return text[: len(text) - len(rest)], rest[len(rest.rstrip(BLANKS)) :]
