"""What a text is for a model: which characters it reads, and as what.

| characters | source | target |
| --- | --- | --- |
| letters and accents, together or apart | NFC | NFC |
| blanks other than U+0020, such as tabs, U+00A0, U+202F | U+0020 | as they are |
| without width: U+200B, U+FEFF | with the blanks around them, one U+0020 | as they are |
| unseen: controls, marks of direction, soft hyphens, U+2060 | nothing | as they are |
| joiners, U+200C and U+200D | as they are | as they are |
| all of these at the ends of a line | nothing | nothing |

At the end of a line, a joiner after a letter or a mark, such as a virama, is spelling and stays.

The column of the source is near SentencePiece's `nmt_nfkc`, without its compatibility forms. It is
a part of `tokenizer.json`, so every program that loads a tokenizer reads sources alike. That of the
target is for learning to write exactly what a corpus has: `tokenizer(text_target=...)`. The ends of
targets are taken off by the tools.
"""

import re
import unicodedata
from collections.abc import Iterable
from itertools import chain

from tokenizers import Regex, normalizers

# First and last code points.
_BLANKS: list[tuple[int, ...]]
_BLANKS = [(0x09, 0x0D), (0x85,), (0xA0,), (0x1680,), (0x2000, 0x200A), (0x2028, 0x2029)]
_BLANKS += [(0x202F,), (0x205F,), (0x3000,)]
_WITHOUT_WIDTH: list[tuple[int, ...]] = [(0x200B,), (0xFEFF,)]
_UNSEEN: list[tuple[int, ...]]
_UNSEEN = [(0x00, 0x08), (0x0E, 0x1F), (0x7F, 0x84), (0x86, 0x9F), (0xAD,), (0x61C,)]
_UNSEEN += [(0x200E, 0x200F), (0x202A, 0x202E), (0x2060, 0x2064), (0x2066, 0x206F)]
_JOINERS = [(0x200C, 0x200D)]


def _characters(spans: Iterable[tuple[int, ...]]) -> str:
    return "".join(chr(code) for span in spans for code in range(span[0], span[-1] + 1))


def _class(spans: Iterable[tuple[int, ...]]) -> str:
    """Inside of a pattern's brackets."""
    return "".join(rf"\x{{{span[0]:X}}}-\x{{{span[-1]:X}}}" for span in spans)


BLANKS = " " + _characters(_BLANKS + _WITHOUT_WIDTH)
UNSEEN = _characters(_UNSEEN)
JOINERS = _characters(_JOINERS)
AT_ENDS = BLANKS + UNSEEN + JOINERS
_MAY_CHANGE = re.compile(f"[{re.escape(AT_ENDS[1:])}]|^ | $")


def blank_ends(text: str) -> tuple[str, str]:
    """What no model reads at the beginning and at the end of a line."""
    rest = text.lstrip(AT_ENDS)
    kept = rest.rstrip(AT_ENDS)
    after = rest[len(kept) :]
    if kept and after[:1] and after[0] in JOINERS and unicodedata.category(kept[-1])[0] in "LM":
        after = after[1:]
    return text[: len(text) - len(rest)], after


def without_blank_ends(text: str) -> str:
    """The text without its `blank_ends`."""
    before, after = blank_ends(text)
    return text[len(before) : len(text) - len(after)]


def source_steps(front: str = "") -> list[normalizers.Normalizer]:
    """The column of the source, but for NFC.

    Args:
        front: What replaces characters that are dropped at the beginning. A pre-tokenizer that puts
            a blank before the first character of the original text puts none where that is gone.
    """
    ends, joiners = _class([(0x20,), *_BLANKS, *_WITHOUT_WIDTH, *_UNSEEN]), _class(_JOINERS)
    # It begins where a run begins, or the time would grow with the square of a run.
    trailing = rf"(?<![{ends}])(?:[{ends}]|(?<![\p{{L}}\p{{M}}])[{joiners}])+\z"
    without_width = _class(_WITHOUT_WIDTH)
    replacements = [
        (trailing, ""),
        (rf"\A[{ends}{joiners}]+", front),
        (f"[{_class(_UNSEEN)}]", ""),
        (f"[{_class(_BLANKS)}]", " "),
        (f"(?<! ) *[{without_width}][ {without_width}]*", " "),
    ]
    return [normalizers.Replace(Regex(pattern), content) for pattern, content in replacements]


def lowercase_steps() -> list[normalizers.Normalizer]:
    """What reads sources in lower case; a sigma that ends a word is the final one."""
    final = normalizers.Replace(Regex(r"(?<=[\p{L}\p{M}])\x{3A3}(?![\p{L}\p{M}])"), "\u03c2")
    return [final, normalizers.Lowercase()]


_SOURCE = normalizers.Sequence(source_steps())
_LOWERCASE = normalizers.Sequence(lowercase_steps())


def as_source(text: str, *, lowercase: bool = False) -> str:
    """The text as a source is read."""
    if lowercase:
        text = _LOWERCASE.normalize_str(text)
    if _MAY_CHANGE.search(text):
        text = _SOURCE.normalize_str(text)
    return unicodedata.normalize("NFC", text)


_OF_SOURCES = {
    step.__getstate__() for step in chain(source_steps(), source_steps(" "), lowercase_steps())
}


def for_targets(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer | None:
    """A tokenizer's normalizer without the steps that only sources go through."""
    if not isinstance(normalizer, normalizers.Sequence):
        return normalizer
    steps = [normalizer[place] for place in range(len(normalizer))]
    return normalizers.Sequence([s for s in steps if s.__getstate__() not in _OF_SOURCES])
