# ruff: noqa: RUF001, SIM905
"""Where sentences end, in any script and without knowing the language.

sentencex, which is told the language, finds the ends in 74 of 100 lines of ten languages
(tests/text/sentences.tsv), and cuts after ordinals; these rules, made after that was seen, in 99.
"""

import re
from collections.abc import Iterator

# Name in the record of a training: the share of its sources that have more than one sentence.
INNER_ENDS = "lines_of_several_sentences"
# Of a model of single sentences. Corpora of sentences have 0 to 1.5 %, of code 3 %.
MOST_INNER_ENDS = 0.02
# Name in the record of a training: the share of its sources without any letter.
WITHOUT_LETTER = "sources_without_letters"
# Of a model that has not learned what becomes of numbers and signs alone.
MOST_WITHOUT_LETTER = 0.01

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
    "abb al approx av avda avv bzw ca capt cf col dhr dipl dott dr dra drs ee env evtl exkl fr frl "
    "gen ggf gov hl hon hr ing inkl jr kgl lt maj mag mevr mgr mio mlle mme mr mrd mrs ms mt mw "
    "mwst pres prof prop rep rev sen sgt sig sigg sog sr sra srta st str tsd ul vgl vs św акад гр "
    "им млн млрд проф ред ст тыс ул".split()
)
_BEFORE_NUMBERS = frozenset(
    "abs afb art bd blz cap ch chap dec dez eq feb fig jan kap no nos nov nr núm oct ok okt p pag "
    "pp pág sec sep sept tab tel vol aug рис стр табл".split()
)
# German, which writes ordinals with a dot and nouns with a capital.
_BEFORE_ORDINALS = frozenset(
    "ab am bis das dem den der des die im jede jeden jeder nächsten seit und vom zum zur".split()
) | {
    f"{word}{ending}"
    for word in ("dein", "ein", "euer", "ihr", "kein", "mein", "sein", "unser")
    for ending in ("", "e", "em", "en", "er", "es")
}
_MONTHS = frozenset(
    "januar jänner februar märz april mai juni juli august september oktober november "
    "dezember".split()
)
_WORD = re.compile(r"\s*+(\w+)")


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


def has_letter(text: str) -> bool:
    """Whether a text has a letter of any script, and not only digits and signs."""
    return any(map(str.isalpha, text))


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
    following_word = _WORD.match(line, found.end())
    return not last or not _is_abbreviated(
        last[0].lower(),
        line[max(start, last.start() - _LONGEST_WORD) : last.start()].split(),
        following_word[1].lower() if following_word else "",
    )


def _is_abbreviated(word: str, before: list[str], following: str) -> bool:
    """Whether the dot after a word, in lower case, belongs to it, as the words around it show."""
    if word.isdecimal() and len(word) <= 2:
        # The number of an item, or an ordinal.
        return not before or following in _MONTHS or before[-1].lower() in _BEFORE_ORDINALS
    is_before_number = word in _BEFORE_NUMBERS or word.endswith("str")
    if word in _ABBREVIATIONS or (following[:1].isdigit() and is_before_number):
        return True
    # Only scripts with capitals abbreviate by letters.
    return bool(_SINGLE_LETTERS.match(word)) and word[0] != word[0].upper()
