"""Learning a vocabulary, and the pipeline of `tokenizers` that splits text into its tokens.

How `bpe` and `unigram` keep every string exactly:

- A piece that begins a word holds the blank in front of it (`" Hund"`), so no character of the text
  is taken over as a marker. One blank is put in front of the text and taken off after decoding, so
  that a word has the same pieces at the beginning of a line as anywhere else.
- A character without a piece becomes its UTF-8 bytes, for which every vocabulary has 256 tokens,
  `<0x00>` to `<0xFF>`.
- No piece spells a special token or a byte token: `<` is split off where one would begin.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .text_vanilla_transformer import for_targets, source_steps

logger = logging.getLogger(__name__)

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


def without_symbols(
    lines: Iterable[str], symbols: Sequence[str], *, between_blanks: bool
) -> Iterator[str]:
    """Lines with a blank for each symbol, for learning the pieces of the text around it.

    Args:
        lines: Text.
        symbols: Symbols that are never split.
        between_blanks: Whether they are symbols between blanks only, as words are.
    """
    # The longest of those that begin at one place.
    pattern = "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))
    found = re.compile(f"(?<![^ ])(?:{pattern})(?![^ ])" if between_blanks else pattern)
    return (found.sub(" ", line) for line in lines)


def independent_parts(line: str) -> list[str]:
    """The words of a line; the line itself if it has white space at an end or side by side."""
    words = line.split(" ")
    # Most lines have blanks only, one between two words, which is seen faster.
    return words if words == line.split() or not _WIDE_SPACE.search(line) else [line]


def subword_backend(
    lines: Iterable[str],
    vocab_size: int,
    tags: list[str],
    kind: Literal["bpe", "unigram"],
    pretokenized: bool,
    show_progress: bool,
) -> Tokenizer:
    """Learns pieces of words, and numbers them after the special and the byte tokens."""
    budget = vocab_size - len(SPECIAL_TOKENS) - len(BYTE_TOKENS)
    backend = _subword_pipeline(tags, pretokenized)
    blank_in_front, *boundaries = backend.pre_tokenizer
    parts = Counter(chain.from_iterable(map(independent_parts, lines)))
    characters = _count_characters(parts)
    learner = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    learner.normalizer = for_targets(backend.normalizer)
    rare, overlong = _rare_characters(characters, budget), _overlong_words(parts)
    learner.pre_tokenizer = pre_tokenizers.Sequence([blank_in_front, *rare, *boundaries, *overlong])
    trainer = (
        trainers.BpeTrainer(vocab_size=budget, min_frequency=2, show_progress=show_progress)
        if kind == "bpe"
        else trainers.UnigramTrainer(vocab_size=budget, show_progress=show_progress)
    )
    unused = next(character for character in map(chr, count()) if character not in characters)
    _learn_from_parts(learner, trainer, parts, unused)
    learned = json.loads(learner.to_str())["model"]
    backend.model = _bpe_model(learned) if kind == "bpe" else _unigram_model(learned)
    return backend


def _subword_pipeline(tags: list[str], pretokenized: bool) -> Tokenizer:
    """Everything but the model."""
    backend = Tokenizer(models.BPE())
    # Every text gets exactly one more blank in front: Metaspace adds it where there is none yet,
    # the normalizer where there is. (The normalizer Prepend would do for both, but Transformers'
    # common tests compare what is decoded with what the normalizer gives.)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\A "), "  "), *source_steps(" "), normalizers.NFC()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # What follows a token that was added is no beginning.
            pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
            pre_tokenizers.Split(
                Regex(rf"<(?=(?:{_special_names(tags)}|{_NAMES_OF_BYTE_TOKENS})>)"), "isolated"
            ),
            pre_tokenizers.Split(Regex(BLANK_SEPARATED if pretokenized else WORDS), "isolated"),
        ]
    )
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


def char_backend(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Every character is a token."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line)
    backend = Tokenizer(_word_level_model(counts, vocab_size))
    backend.normalizer = normalizers.Sequence([*source_steps(), normalizers.NFC()])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def word_backend(
    lines: Iterable[str], vocab_size: int, tags: list[str], symbols: list[str]
) -> Tokenizer:
    """What is between blanks is a token; `symbols` come last."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split(" "))
    for no_word in ("", *SPECIAL_TOKENS, *tags):
        del counts[no_word]
    backend = Tokenizer(_word_level_model(counts, vocab_size, symbols))
    # `</s>` becomes a word that is not in the vocabulary, and as long as the original.
    opens_a_special_word = rf"(?<![^ ])<(?=(?:{_special_names(tags)})>(?![^ ]))"
    spelled = normalizers.Replace(Regex(opens_a_special_word), "\0")
    backend.normalizer = normalizers.Sequence([*source_steps(), normalizers.NFC(), spelled])
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    # Without a decoder, tokens are joined by blanks.
    return backend


def _special_names(tags: list[str]) -> str:
    """Pattern of the text between the brackets of a special token."""
    return "|".join([_NAMES_OF_SPECIAL_TOKENS, *(re.escape(tag[1:-1]) for tag in tags)])


def _word_level_model(
    counts: Counter[str], vocab_size: int, symbols: Sequence[str] = ()
) -> models.WordLevel:
    kept = [token for token, _ in counts.most_common(vocab_size - len(SPECIAL_TOKENS))]
    vocabulary = _numbered([*SPECIAL_TOKENS, *kept, *symbols])
    return models.WordLevel(vocab=vocabulary, unk_token=UNK_TOKEN)


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}
