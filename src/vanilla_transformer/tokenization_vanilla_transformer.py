"""Text to token ids and back: training a tokenizer, and the tokens of target languages.

Sources and targets are read differently, see `text_vanilla_transformer`: targets keep all of their
characters, and `decode` gives them back exactly, in NFC.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, Self, get_args

from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .text_vanilla_transformer import for_targets, lowercase_steps
from .vocabulary_vanilla_transformer import (
    BOS_TOKEN,
    BYTE_TOKENS,
    EOS_TOKEN,
    PAD_TOKEN,
    SPECIAL_TOKENS,
    UNK_TOKEN,
    char_backend,
    subword_backend,
    without_symbols,
    word_backend,
)

logger = logging.getLogger(__name__)

TokenizerKind = Literal["bpe", "unigram", "char", "word"]

_LANGUAGE_TAG = re.compile(r"<2([\w-]+)>")


class VanillaTransformerTokenizer(PreTrainedTokenizerFast):
    """Fast tokenizer that is trained on your own text; a sentence ends in `</s>`.

    Its ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`. All that encoding and decoding need is in
    the saved `tokenizer.json` and `tokenizer_config.json`; this class adds training, so where it is
    absent a saved folder loads as the plain fast tokenizer.

    Text that spells a built-in special token (`<pad>`, `<s>`, `</s>`, `<unk>`, the tag of a target
    language) or a byte token is plain text (`split_special_tokens=True`). Tokens of `add_tokens`
    are found in text and never split; special ones that you add are not looked for in text, and a
    warning says so. Python strings with lone surrogates are no Unicode text: encoding them raises
    an error.

    `tokenizer(text)` reads a source, and `tokenizer(text_target=text)` a target, whose characters
    are all kept. Where this class is absent, both are read as sources.

    Train one by `train`: the inherited `train_new_from_iterator` gives a vocabulary without byte
    tokens.
    """

    # Without an `__init__`: with one, Transformers would rebuild the pipeline of a saved tokenizer
    # from only its vocabulary.

    @classmethod
    def train(
        cls,
        texts: Iterable[str] | None = None,
        *,
        files: Sequence[str | os.PathLike[str]] | None = None,
        vocab_size: int = 10_000,
        kind: TokenizerKind = "bpe",
        pretokenized: bool = False,
        target_languages: Sequence[str] = (),
        symbols: Sequence[str] = (),
        lowercase_sources: bool = False,
        show_progress: bool = False,
    ) -> Self:
        """Learns a vocabulary; the same text gives the same tokenizer.

        For a joint vocabulary give the text of both languages. It is read once; of `bpe`, `unigram`
        and `word`, each different word is held in memory.

        Args:
            texts: Lines to learn from; either this or `files`.
            files: UTF-8 text files, plain or gzipped (`.gz`); lines end at line feeds only.
            vocab_size: Upper limit of the number of tokens, everything counted: the 4 special
                tokens, those of `target_languages`, for `bpe` and `unigram` the 256 byte tokens,
                and learned entries.
            kind: `bpe` and `unigram` learn pieces of words and decode every target exactly. With
                `char` a token is a character, with `word` a string between blanks, and decoding
                puts one blank between words; in both, unknown tokens become `<unk>`, and so does a
                word that spells a special token.
            pretokenized: The text consists of tokens separated by blanks, and these are the only
                boundaries that pieces of `bpe` and `unigram` respect; otherwise letters, digits and
                signs are kept apart too. `char` and `word` are the same either way.
            target_languages: Names such as `de`, for one model of several directions (Johnson et
                al. 2017, arXiv 1611.04558). Each gets a token that no text can spell, `<2de>`, see
                `language_tags`.
            symbols: Text that is kept whole, such as `<ph>`: each is one token, of `word` between
                blanks only, and counts towards `vocab_size`. Nothing is learned from it.
            lowercase_sources: Read sources in lower case. Give those to learn from in it, too.
            show_progress: Show the trainer's progress bars.

        Raises:
            ValueError: If not exactly one of `texts` and `files` is given, the text is empty,
                `kind` is unknown, `vocab_size` is too small, a language is no name, or text cannot
                have a symbol.
        """
        lines = _lines_of(texts, files)
        tags = [_language_tag(language) for language in target_languages]
        symbols = list(dict.fromkeys(symbols))
        _check_vocab_size(kind, vocab_size, len(tags) + len(symbols))
        vocab_size -= len(tags) + len(symbols)
        if symbols:
            lines = without_symbols(lines, symbols, between_blanks=kind == "word")
        if kind == "char":
            backend = char_backend(lines, vocab_size)
        elif kind == "word":
            backend = word_backend(lines, vocab_size, tags, symbols)
        else:
            backend = subword_backend(lines, vocab_size, tags, kind, pretokenized, show_progress)
        if lowercase_sources:
            backend.normalizer = normalizers.Sequence([*lowercase_steps(), backend.normalizer])
        tokenizer = cls.of_pipeline(backend, [*SPECIAL_TOKENS, *tags])
        if kind != "word":
            tokenizer.add_tokens(symbols)
        return tokenizer

    @classmethod
    def of_pipeline(cls, backend: Tokenizer, special_tokens: Sequence[str]) -> Self:
        """A tokenizer that ends each sentence in `</s>`.

        Args:
            backend: Splits text, and has an id for each special token; changed in place.
            special_tokens: `<pad>`, `<s>`, `</s>`, `<unk>` and others that no text can spell.
        """
        backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {EOS_TOKEN}",
            pair=f"$A {EOS_TOKEN} $B:1 {EOS_TOKEN}:1",
            special_tokens=[(EOS_TOKEN, backend.token_to_id(EOS_TOKEN))],
        )
        return cls(
            tokenizer_object=backend,
            pad_token=PAD_TOKEN,
            bos_token=BOS_TOKEN,
            eos_token=EOS_TOKEN,
            unk_token=UNK_TOKEN,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
            padding_side="right",
            truncation_side="right",
        )

    def __call__(
        self,
        text: Any = None,
        text_pair: Any = None,
        text_target: Any = None,
        text_pair_target: Any = None,
        *args: Any,
        max_target_length: int | None = None,
        **kwargs: Any,
    ) -> BatchEncoding:
        """Encodes sources, and targets as `labels`; by themselves, targets are `input_ids`.

        Args:
            text: A source, or several.
            text_pair: Second part of each source.
            text_target: A target, or several, whose characters are all kept.
            text_pair_target: Second part of each target.
            args: Of Transformers' own.
            max_target_length: Tokens of a target; None: as `max_length` says.
            kwargs: Of Transformers' own.
        """
        if text_target is None:
            return super().__call__(text, text_pair, None, None, *args, **kwargs)
        limit = {} if max_target_length is None else {"max_length": max_target_length}
        of_sources = self.backend_tokenizer.normalizer
        self.backend_tokenizer.normalizer = for_targets(of_sources)
        try:
            targets = super().__call__(
                text_target, text_pair_target, None, None, *args, **kwargs | limit
            )
        finally:
            self.backend_tokenizer.normalizer = of_sources
        if text is None:
            return targets
        encoded = super().__call__(text, text_pair, None, None, *args, **kwargs)
        encoded["labels"] = targets["input_ids"]
        return encoded

    def add_tokens(
        self,
        new_tokens: str | AddedToken | Sequence[str | AddedToken],
        special_tokens: bool = False,
    ) -> int:
        """Adds tokens that text may spell; returns by how many the tokenizer grew.

        The library looks for them in text as the normalizer has left it: only so does the
        normalizer see the whole text, and knows where it begins.

        Raises:
            ValueError: If no text can have a token that is not special.
        """
        known = {token.content for token in self.added_tokens_decoder.values()}
        tokens: list[str | AddedToken] = []
        for token in [new_tokens] if isinstance(new_tokens, str | AddedToken) else new_tokens:
            is_special = special_tokens or getattr(token, "special", False)
            content = str(token)
            is_new = content not in {*known, *SPECIAL_TOKENS}
            if is_new and is_special and not _LANGUAGE_TAG.fullmatch(content):
                logger.warning(
                    "%r is added as a special token, which is not looked for in text. For text "
                    "that has it, use `add_tokens`.",
                    content,
                )
            tokens.append(self._found_in_text(token) if is_new and not is_special else token)
        return int(super().add_tokens(tokens, special_tokens))

    def _found_in_text(self, token: str | AddedToken) -> AddedToken:
        content = str(token)
        normalizer = self.backend_tokenizer.normalizer
        read = normalizer.normalize_str(content).strip(" ") if normalizer else content
        if read != content:
            raise ValueError(
                "An added token must be text that the tokenizer's normalizer leaves as it is, got "
                f"{content!r}, which it reads as {read!r}."
            )
        if isinstance(token, str):
            return AddedToken(token, normalized=True, special=False)
        sides = {side: getattr(token, side) for side in ("single_word", "lstrip", "rstrip")}
        return AddedToken(content, normalized=True, special=False, **sides)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> tuple[str, ...]:
        """Saves the tokenizer without the truncation and padding of the last call."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        files: tuple[str, ...] = super().save_pretrained(save_directory, *args, **kwargs)
        return files


def _lines_of(
    texts: Iterable[str] | None, files: Sequence[str | os.PathLike[str]] | None
) -> Iterator[str]:
    """Lines of either, in NFC; raises a ValueError for both or neither, and if all are empty."""
    if (texts is None) == (files is None):
        raise ValueError(
            "Expected exactly one of `texts` and `files`, got "
            f"{'neither' if texts is None else 'both'}."
        )
    if isinstance(texts, str) or isinstance(files, str | os.PathLike):
        raise ValueError(
            "`texts` and `files` must hold several strings, got the single one "
            f"{texts if files is None else files!r:.60}. Put it into a list."
        )
    lines = chain.from_iterable(map(_read_lines, files or ())) if texts is None else texts
    return _with_text(unicodedata.normalize("NFC", line) for line in lines)


def _read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
        for line in lines:
            yield line.removesuffix("\n")


def language_tags(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tokens that name a target language, by language; none for most models."""
    tags = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and (found := _LANGUAGE_TAG.fullmatch(token.content)):
            tags[found[1]] = token_id
    return tags


def _language_tag(language: str) -> str:
    tag = f"<2{language}>"
    if not _LANGUAGE_TAG.fullmatch(tag):
        raise ValueError(
            "A target language must have a name of letters, digits, - and _, such as de or "
            f"zh-Hans, got {language!r}."
        )
    return tag


def _check_vocab_size(kind: TokenizerKind, vocab_size: int, num_tags: int) -> None:
    """Raises a ValueError for an unknown kind, or when nothing could be learned for it."""
    if kind not in get_args(TokenizerKind):
        raise ValueError(
            f"`kind` must be one of {', '.join(get_args(TokenizerKind))}, got {kind!r}."
        )
    special = len(SPECIAL_TOKENS) + num_tags
    minimum, reserved = special + 1, f"{special} special tokens"
    if kind in ("bpe", "unigram"):
        # Half of what they learn may be single characters: there must be two to learn.
        minimum += len(BYTE_TOKENS) + 1
        reserved += f" and {len(BYTE_TOKENS)} byte tokens"
    if vocab_size < minimum:
        raise ValueError(
            f"`vocab_size` must be at least {minimum} for kind {kind!r}, because it counts "
            f"{reserved} too, got {vocab_size}. Give a larger one."
        )


def _with_text(lines: Iterable[str]) -> Iterator[str]:
    """The lines; raises a ValueError after them if all are empty."""
    number, has_text = 0, False
    for line in lines:
        number, has_text = number + 1, has_text or bool(line)
        yield line
    if not has_text:
        raise ValueError(f"There is no text to learn from: got {number} lines, all empty.")
