# ruff: noqa: RUF001, SIM905
"""Where sentences end, in any script and without knowing the language.

Packages that know languages (pysbd, sentencex, sentence-splitter) do not do better without being
told the language, and keep `zwei. drei. vier.` together or cut `am 3. Mai`.
"""

import re
from collections.abc import Iterator

# Each alternative begins with a character, so that text without them is skipped quickly. The
# lookbehind matches at the first mark only: a million dots would otherwise take quadratic time.
_MARKS = re.compile(
    # White space follows.
    r"""(?P<western>[.!?…](?<![.!?…].)[.!?…]*+)(?P<closed>["'”’“‘»«)\]]*+)(?=\s)"""
    # The question mark of Greek.
    r"""|;(?<=[\u0370-\u03ff\u1f00-\u1fff];)(?=\s)"""
    # No blank need follow.
    r"""|(?P<eastern>[。！？｡．]++[」』”’）》〉】]*+)"""
    # Marks of Arabic, Armenian, Indian scripts, Ethiopic, Burmese, Khmer, Mongolian, Santali, Lisu.
    r"""|[؟۔։।॥።፧။។៕᠃᱾꓿]++["'”’»)\]]*+"""
    # The mark of Tibetan also ends a line.
    r"""|[།༎]++(?=\s)"""
    # Thai and Lao have blanks for marks, but also around numbers, foreign words and the sign of
    # repetition.
    r"""|[{thai}](?=\s++[{thai}])""".replace(
        "{thai}",
        r"\u0e01-\u0e2e\u0e30-\u0e3a\u0e40-\u0e45\u0e47-\u0e4e"
        r"\u0e81-\u0eae\u0eb0-\u0ec4\u0ec8-\u0ece",
    )
)
# The first character of a word after a mark, or of a sentence.
_FIRST = re.compile(r"""[\s"'“‘„‚«»(\[¿¡–—-]*+(\w)""")
# Of a Japanese sentence that goes on after a quotation.
_GOES_ON = re.compile(r"[ぁ-ん、，]")
_WORD_CHARACTER = re.compile(r"\w")
_LAST_WORD_CHARACTER = re.compile(r"\w\W*+\Z")
_LAST_WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*\Z")
# As in U.S., z.B. or the initials of a name.
_SINGLE_LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*\Z")
_LONGEST_WORD = 20

# Words with a dot that a capital letter may follow within a sentence, and those before numbers.
_ABBREVIATIONS = frozenset(
    "abb al approx bzw ca capt cf col dipl dr dra drs evtl exkl fr frl gen ggf gov hl hon hr ing "
    "inkl jr kgl lt maj mag mlle mme mr mrs ms mt pres prof prop rep rev sen sgt sog sr sra srta "
    "st str vgl vs акад гр им проф ред ст ул".split()
)
_BEFORE_NUMBERS = frozenset(
    "abs art bd cap ch chap dec dez eq feb fig jan kap no nos nov nr núm oct okt p pp sec sep sept "
    "tab tel vol aug рис стр табл".split()
)
# German, which writes ordinals with a dot and nouns with a capital.
_BEFORE_ORDINALS = frozenset(
    "ab am bis das dem den der des die im jeden nächsten seit und vom zum zur".split()
)


def split_line(line: str) -> list[str]:
    """The sentences of a line, which together are the line; blanks stand before a sentence."""
    sentences, start = [], 0
    last_word = _LAST_WORD_CHARACTER.search(line)
    for end in sentence_ends(line, 0, last_word.start() if last_word else 0):
        # Marks alone are no sentence.
        if _WORD_CHARACTER.search(line, start, end):
            sentences.append(line[start:end])
            start = end
    return [*sentences, line[start:]]


def has_inner_end(line: str) -> bool:
    """Whether a line has more than one sentence."""
    return len(split_line(line)) > 1


def sentence_ends(line: str, start: int, end: int) -> Iterator[int]:
    """Places after the sentences of `line[start:end]`, the last one if it has a mark.

    Time is in proportion to the text.
    """
    for found in _MARKS.finditer(line, start, end + 1):
        if found.end() <= end and _is_end(line, start, found):
            yield found.end()
            start = found.end()


def _is_end(line: str, start: int, found: re.Match[str]) -> bool:
    if found["eastern"]:
        is_closed = found["eastern"][-1] in "」』”’）》〉】"
        return not (is_closed and _GOES_ON.match(line, found.end()))
    if not found["western"]:
        return True
    following = _FIRST.match(line, found.end())
    if following and following[1].islower():
        first = _FIRST.match(line, start)
        # Where sentences begin with a capital, this is no beginning.
        if found["closed"] or not first or not first[1].islower():
            return False
        if found["western"] in ("...", "…"):
            return False
    if found["western"] != "." or found["closed"]:
        return True
    place = found.start()
    last = _LAST_WORD.search(line, max(start, place - _LONGEST_WORD), place)
    return not last or not _is_abbreviated(
        last[0].lower(),
        line[max(start, last.start() - _LONGEST_WORD) : last.start()].split(),
        is_before_digit=bool(following and following[1].isdigit()),
    )


def _is_abbreviated(word: str, before: list[str], *, is_before_digit: bool) -> bool:
    """Whether the dot after a word, in lower case, belongs to it, as the words before it show."""
    if word.isdecimal() and len(word) <= 2:
        # The number of an item, or an ordinal.
        return not before or before[-1].lower() in _BEFORE_ORDINALS
    if word in _ABBREVIATIONS or (is_before_digit and word in _BEFORE_NUMBERS):
        return True
    # Only scripts with capitals abbreviate by letters.
    return bool(_SINGLE_LETTERS.match(word)) and word[0] != word[0].upper()
