"""Text to token ids and back: training a tokenizer, finding unknown characters and words.

How `bpe` and `unigram` keep every string exactly:

- A piece that begins a word holds the blank in front of it (`" Hund"`), so no character of the text
  is taken over as a marker. One blank is put in front of the text and taken off after decoding, so
  that a word has the same pieces at the beginning of a line as anywhere else.
- A character without a piece becomes its UTF-8 bytes, for which every vocabulary has 256 tokens,
  `<0x00>` to `<0xFF>`.
- No piece spells a special token or a byte token: `<` is split off where one would begin.

U+200B and U+FEFF, which nobody sees, are the exception: with the blanks around them they become one
blank, or nothing at the ends of a line, as in SentencePiece's nmt_nfkc. U+200C and U+200D stay:
they are part of the spelling of Persian or Hindi words and of emoji.
"""

from __future__ import annotations

import gzip
import inspect
import json
import logging
import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any, Literal, Self, get_args

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase

from .added_tokens_vanilla_transformer import (
    check_added,
    found_everywhere,
    is_of_words,
    with_symbols,
    without_symbols,
)
from .composing_vanilla_transformer import DECOMPOSED_FORMS, ComposingTokenizer

logger = logging.getLogger(__name__)

TokenizerKind = Literal["bpe", "unigram", "char", "word"]
UnicodeForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<s>", "</s>", "<unk>"
# A token's place in the list is its id.
SPECIAL_TOKENS = [PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

# Letters with their accents and joiners, single digits, and signs are kept apart; each takes the
# blank in front of it. Of several blanks the last one belongs to what follows.
WORDS = r" ?\p{L}[\p{L}\p{M}\x{200C}\x{200D}]*| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLANK_SEPARATED = r" ?[^ ]+| +(?= )| +"
_NAMES_OF_SPECIAL_TOKENS = r"pad|/?s|unk"
# The decoder takes lower-case digits for bytes too.
_NAMES_OF_BYTE_TOKENS = r"0x[0-9A-Fa-f]{2}"

# The trainers take time that grows with the square of the longest word.
_LONGEST_TRAINED_WORD = 500
_WORDS_AT_A_TIME = 1000

# `WORDS` keeps white space together that stands side by side.
_WIDE_SPACE = re.compile(r"\A\s|\s\s|\s\Z")

# As in SentencePiece's nmt_nfkc, whose U+200C and U+200D are left alone here.
_INVISIBLE = r"\x{200B}\x{FEFF}"
_IS_INVISIBLE = re.compile("[\u200b\ufeff]")

_LANGUAGE_TAG = re.compile(r"<2([\w-]+)>")


class VanillaTransformerTokenizer(ComposingTokenizer):
    """Fast tokenizer that is trained on your own text; a sentence ends in `</s>`.

    Its ids 0 to 3 are `<pad>`, `<s>`, `</s>` and `<unk>`. All that encoding and decoding need is in
    the saved `tokenizer.json` and `tokenizer_config.json`; this class adds training, so where it is
    absent a saved folder loads as the plain fast tokenizer.

    Text that spells a built-in special token (`<pad>`, `<s>`, `</s>`, `<unk>`, the tag of a target
    language) or a byte token is plain text (`split_special_tokens=True`). Tokens that you add are
    found in text, by `add_tokens` and by `add_special_tokens` alike, and never split; with
    `skip_special_tokens=True` decoding drops special ones, as Transformers does. `word` tokenizers
    find them between blanks, all others anywhere. Add tokens before saving: the plain fast class
    finds them too, but not special ones that are added to it.
    Python strings with lone surrogates are no Unicode text: encoding them raises an error.

    Train one by `train`: the inherited `train_new_from_iterator` gives a vocabulary without byte
    tokens.

    There is no `__init__`: Transformers would then rebuild the pipeline of a saved tokenizer from
    only its vocabulary.
    """

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
        unicode_form: UnicodeForm | None = None,
        symbols: Sequence[str] = (),
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
            kind: `bpe` and `unigram` learn pieces of words and decode every string exactly, but for
                U+200B and U+FEFF, which become blanks in all kinds. With `char` a token is a
                character, with `word` a string between blanks, and decoding puts one blank between
                words; in both, unknown tokens become `<unk>`, and so does a word
                that spells a special token.
            pretokenized: The text consists of tokens separated by blanks, and these are the only
                boundaries that pieces of `bpe` and `unigram` respect; otherwise letters, digits and
                signs are kept apart too. `char` and `word` are the same either way.
            target_languages: Names such as `de`, for one model of several directions (Johnson et
                al. 2017, arXiv 1611.04558). Each gets a token that no text can spell, `<2de>`, see
                `language_tags`.
            unicode_form: Unicode normalization form of all text on the way in; None: text stays as
                it is. NFD and NFKD take syllables of Hangul and letters with accents apart, and
                decoded text is then in NFC, unless most of the text was apart already. Of `word`,
                they change how tokens are spelled, not how many there are.
            symbols: Text that is kept whole, such as `<ph>`: each is one token, as `add_tokens`
                adds it, and counts towards `vocab_size`. Nothing is learned from it.
            show_progress: Show the trainer's progress bars.

        Raises:
            ValueError: If not exactly one of `texts` and `files` is given, the text is empty,
                `kind` is unknown, `vocab_size` is too small, a language is no name, or text cannot
                have a symbol.
        """
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
        tags = [_language_tag(language) for language in target_languages]
        symbols = list(dict.fromkeys(symbols))
        _check_vocab_size(kind, vocab_size, len(tags) + len(symbols))
        vocab_size -= len(tags) + len(symbols)
        lines = chain.from_iterable(map(_read_lines, files or ())) if texts is None else iter(texts)
        normalizer = None if unicode_form is None else _unicode_normalizer(unicode_form)
        changed: Counter[str] = Counter()
        if unicode_form in DECOMPOSED_FORMS:
            lines = _count_changed(lines, changed)
        if normalizer:
            lines = map(normalizer.normalize_str, lines)
        lines = _with_text(map(_without_invisible, lines))
        if symbols:
            lines = without_symbols(lines, symbols, between_blanks=kind == "word")

        if kind == "char":
            backend = _char_backend(lines, vocab_size)
        elif kind == "word":
            backend = _word_backend(lines, vocab_size, tags)
        else:
            backend = _subword_backend(lines, vocab_size, tags, kind, pretokenized, show_progress)
        if normalizer:
            backend.normalizer = normalizers.Sequence([normalizer, backend.normalizer])
        # All lines have been read by now.
        is_apart = changed["NFC"] > changed["NFD"]
        tokenizer = cls.of_pipeline(
            backend, [*SPECIAL_TOKENS, *tags], None if is_apart else unicode_form
        )
        tokenizer.add_tokens(symbols)
        return tokenizer

    @classmethod
    def of_pipeline(
        cls,
        backend: Tokenizer,
        special_tokens: Sequence[str],
        unicode_form: UnicodeForm | None = None,
    ) -> Self:
        """A tokenizer that ends each sentence in `</s>`.

        Args:
            backend: Splits text, and has an id for each special token; changed in place.
            special_tokens: `<pad>`, `<s>`, `</s>`, `<unk>` and others that no text can spell.
            unicode_form: Form that the normalizer of `backend` gives to text; decoding composes
                text of NFD and NFKD. None: decoded text stays as it is.
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
            **_settings_of_form(unicode_form),
        )

    def _add_tokens(
        self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False
    ) -> int:
        """Adds tokens that text may spell, see the class; returns by how many the tokenizer grew.

        Raises:
            ValueError: If the normalizer changes a token, or one of `word` has a blank.
        """
        size = len(self)
        known = {token.content: token.special for token in self.added_tokens_decoder.values()}
        special: list[str | AddedToken] = []
        plain: list[str | AddedToken] = []
        new = []
        for token in new_tokens:
            is_special = special_tokens or getattr(token, "special", False)
            (special if is_special else plain).append(token)
            # A token that is special already is built in, or was made a symbol before.
            if str(token) not in known or (is_special and not known[str(token)]):
                new.append(str(token))
        check_added(new, self.backend_tokenizer)
        of_words = is_of_words(self.backend_tokenizer)
        whole = {*map(str, special), *(map(str, plain) if of_words else ())}
        is_tag = _LANGUAGE_TAG.fullmatch
        symbols = [token for token in dict.fromkeys(new) if token in whole and not is_tag(token)]
        if symbols:
            free, id_of = count(size), self.backend_tokenizer.token_to_id
            # Those that are known keep their ids; the others get the next ones.
            ids = {token: next(free) if (n := id_of(token)) is None else n for token in symbols}
            old = [token for token in known if known[token] and token not in SPECIAL_TOKENS]
            old = [token for token in old if not is_tag(token)]
            self._tokenizer = with_symbols(self.backend_tokenizer, ids, old)
        super()._add_tokens(special, special_tokens=True)
        if remaining := [token for token in plain if str(token) not in whole]:
            super()._add_tokens([found_everywhere(token) for token in remaining])
        return len(self) - size

    @staticmethod
    def independent_parts(line: str) -> list[str]:
        """The words of a line; the line itself if it has white space at an end or side by side."""
        words = line.split(" ")
        # Most lines have blanks only, one between two words, which is seen faster.
        return words if words == line.split() or not _WIDE_SPACE.search(line) else [line]

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> tuple[str, ...]:
        """Saves the tokenizer without the truncation and padding of the last call."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        code: tuple[str, ...] = ()
        if "unicode_form" in self.init_kwargs:
            # Before the files of super, which uploads the folder at its end.
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            code = (str(shutil.copy(inspect.getfile(ComposingTokenizer), save_directory)),)
        files: tuple[str, ...] = super().save_pretrained(save_directory, *args, **kwargs)
        return files + code


def _read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
        for line in lines:
            yield line.removesuffix("\n")


def _unicode_normalizer(form: UnicodeForm) -> normalizers.Normalizer:
    if form not in get_args(UnicodeForm):
        raise ValueError(
            f"`unicode_form` must be one of {', '.join(get_args(UnicodeForm))}, got {form!r}."
        )
    normalizer: normalizers.Normalizer = getattr(normalizers, form)()
    return normalizer


def _invisible_to_blanks(front: str = "") -> list[normalizers.Normalizer]:
    """Makes one blank of invisible characters with the blanks around them, none at an end.

    Args:
        front: Their replacement at the beginning of a text.
    """
    run = f" *[{_INVISIBLE}][ {_INVISIBLE}]*"
    return [
        normalizers.Replace(Regex(rf"{run}\z"), ""),
        normalizers.Replace(Regex(rf"\A{run}"), front),
        normalizers.Replace(Regex(run), " "),
    ]


def _without_invisible(line: str) -> str:
    if _IS_INVISIBLE.search(line):
        for step in _invisible_to_blanks():
            line = step.normalize_str(line)
    return line


def _count_changed(lines: Iterable[str], changed: Counter[str]) -> Iterator[str]:
    """The lines; counts those that NFC and NFD would change. Text that is apart is so in most."""
    for line in lines:
        changed.update(form for form in ("NFC", "NFD") if not unicodedata.is_normalized(form, line))
        yield line


def _settings_of_form(form: UnicodeForm | None) -> dict[str, Any]:
    """Settings of a saved tokenizer; they name the code that composes what was decomposed."""
    if form not in DECOMPOSED_FORMS:
        return {}
    module = ComposingTokenizer.__module__.rpartition(".")[2]
    code = f"{module}.{ComposingTokenizer.__name__}"
    return {"unicode_form": form, "auto_map": {"AutoTokenizer": [None, code]}}


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


def _subword_backend(
    lines: Iterable[str],
    vocab_size: int,
    tags: list[str],
    kind: TokenizerKind,
    pretokenized: bool,
    show_progress: bool,
) -> Tokenizer:
    """Learns pieces of words, and numbers them after the special and the byte tokens."""
    budget = vocab_size - len(SPECIAL_TOKENS) - len(BYTE_TOKENS)
    # Every text gets exactly one more blank in front: Metaspace adds it where there is none yet,
    # the normalizer where there is. (The normalizer Prepend would do for both, but Transformers'
    # common tests compare what is decoded with what the normalizer gives.)
    # Metaspace looks for the place where the original text begins, which must not be dropped, so
    # characters that are dropped there leave that blank.
    normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\A "), "  "), *_invisible_to_blanks(" ")]
    )
    # What follows a token that was added is no beginning.
    blank_in_front = pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False)
    boundaries = [
        pre_tokenizers.Split(
            Regex(rf"<(?=(?:{_special_names(tags)}|{_NAMES_OF_BYTE_TOKENS})>)"), "isolated"
        ),
        pre_tokenizers.Split(Regex(BLANK_SEPARATED if pretokenized else WORDS), "isolated"),
    ]

    parts = Counter(chain.from_iterable(map(VanillaTransformerTokenizer.independent_parts, lines)))
    characters = _count_characters(parts)
    learner = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            blank_in_front,
            *_rare_characters(characters, budget),
            *boundaries,
            *_overlong_words(parts),
        ]
    )
    trainer = (
        trainers.BpeTrainer(vocab_size=budget, min_frequency=2, show_progress=show_progress)
        if kind == "bpe"
        else trainers.UnigramTrainer(vocab_size=budget, show_progress=show_progress)
    )
    unused = next(character for character in map(chr, count()) if character not in characters)
    _learn_from_parts(learner, trainer, parts, unused)
    learned = json.loads(learner.to_str())["model"]

    backend = Tokenizer(_bpe_model(learned) if kind == "bpe" else _unigram_model(learned))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([blank_in_front, *boundaries])
    backend.decoder = decoders.Sequence(
        # Strip works on each token by itself, so the tokens are joined before it.
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _count_characters(parts: Mapping[str, int]) -> Counter[str]:
    """How often each character occurs in parts with a blank in front, in the order of the text."""
    characters = Counter(" ")
    characters[" "] = sum(parts.values())
    for part, number in parts.items():
        for character in part:
            characters[character] += number
    return characters


def _learn_from_parts(
    learner: Tokenizer, trainer: trainers.Trainer, parts: Mapping[str, int], unused: str
) -> None:
    """Trains a tokenizer as lines of these parts would.

    The trainers know words and their counts only, and no way to be given these: splitting each part
    once and repeating its words takes a fifth of the time of splitting all lines.
    """
    words: Counter[str] = Counter()
    for part, number in parts.items():
        for word, _ in learner.pre_tokenizer.pre_tokenize_str(
            learner.normalizer.normalize_str(part)
        ):
            words[word] += number
    learner.normalizer = None
    learner.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(unused)
    occurrences = chain.from_iterable(repeat(word, number) for word, number in words.items())
    blocks = iter(lambda: unused.join(islice(occurrences, _WORDS_AT_A_TIME)), "")
    length = -(-words.total() // _WORDS_AT_A_TIME)
    learner.train_from_iterator(blocks, trainer, length=length)


def _rare_characters(counts: Counter[str], budget: int) -> list[pre_tokenizers.PreTokenizer]:
    """Cuts the rarest characters out of the training text where they would take too many tokens.

    The most frequent ones may take half of `budget`; the others are left to the byte tokens. BPE's
    trainer would choose at random among equally frequent ones, and unigram's would exceed `budget`
    or never finish.
    """
    # NUL comes last: it is the end mark of unigram's trainer, which gives no score to NUL alone.
    ranked = sorted(counts, key=lambda character: (character == "\0", -counts[character]))
    rare = ranked[budget // 2 :]
    if not rare:
        return []
    logger.warning(
        "%d of %d different characters are left to the byte tokens: a larger vocab_size has room "
        "for them.",
        len(rare),
        len(counts),
    )
    pattern = "".join(rf"\x{{{ord(character):X}}}" for character in rare)
    return [pre_tokenizers.Split(Regex(f"[{pattern}]"), "removed")]


def _overlong_words(parts: Iterable[str]) -> list[pre_tokenizers.PreTokenizer]:
    """Cuts words of more than 500 characters, such as binary data, in training only."""
    # A word has one more blank in front.
    if max(map(len, parts)) < _LONGEST_TRAINED_WORD:
        return []
    return [pre_tokenizers.Split(Regex(rf"[\s\S]{{{_LONGEST_TRAINED_WORD}}}"), "isolated")]


def _bpe_model(learned: dict[str, Any]) -> models.BPE:
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    return models.BPE(
        vocab=_numbered([*SPECIAL_TOKENS, *BYTE_TOKENS, *pieces]),
        merges=[(left, right) for left, right in learned["merges"]],
        unk_token=UNK_TOKEN,
        byte_fallback=True,
    )


def _unigram_model(learned: dict[str, Any]) -> models.Unigram:
    """Builds the model from learned pieces whose scores no longer depend on chance.

    The trainer iterates over hash tables: sums differ in their last digits from run to run, and a
    character that lost its score gets the lowest one plus 0.0001 for each earlier such character.
    """
    scores: dict[str, float] = dict(learned["vocab"])
    lowest = min(scores.values())
    last_given = lowest + 0.0001 * sum(len(piece) == 1 for piece in scores)
    settled = {
        piece: round(lowest if len(piece) == 1 and score <= last_given else score, 4)
        for piece, score in scores.items()
    }
    pieces = sorted(settled.items(), key=lambda item: (-item[1], item[0]))
    # The score of a token that no text can spell is never used.
    unspellable = [(token, 0.0) for token in (*SPECIAL_TOKENS, *BYTE_TOKENS)]
    return models.Unigram(
        vocab=[*unspellable, *pieces], unk_id=SPECIAL_TOKENS.index(UNK_TOKEN), byte_fallback=True
    )


def _char_backend(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    backend = Tokenizer(_word_level_model(counts, vocab_size))
    backend.normalizer = normalizers.Sequence(_invisible_to_blanks())
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _word_backend(lines: Iterable[str], vocab_size: int, tags: list[str]) -> Tokenizer:
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split(" "))
    for no_word in ("", *SPECIAL_TOKENS, *tags):
        del counts[no_word]
    backend = Tokenizer(_word_level_model(counts, vocab_size))
    # `</s>` becomes a word that is not in the vocabulary, and as long as the original.
    opens_a_special_word = rf"(?<![^ ])<(?=(?:{_special_names(tags)})>(?![^ ]))"
    backend.normalizer = normalizers.Sequence(
        [*_invisible_to_blanks(), normalizers.Replace(Regex(opens_a_special_word), "\0")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    # Without a decoder, tokens are joined by blanks.
    return backend


def _special_names(tags: list[str]) -> str:
    """Pattern of the text between the brackets of a special token."""
    return "|".join([_NAMES_OF_SPECIAL_TOKENS, *(re.escape(tag[1:-1]) for tag in tags)])


def _word_level_model(counts: Counter[str], vocab_size: int) -> models.WordLevel:
    kept = [token for token, _ in counts.most_common(vocab_size - len(SPECIAL_TOKENS))]
    return models.WordLevel(vocab=_numbered([*SPECIAL_TOKENS, *kept]), unk_token=UNK_TOKEN)


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}
