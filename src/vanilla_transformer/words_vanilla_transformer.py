"""Words and how often they occur, from which a vocabulary is learned."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice, repeat

from tokenizers import Tokenizer, pre_tokenizers, trainers

_WORDS_AT_A_TIME = 1000


def count_characters(parts: Mapping[str, int]) -> Counter[str]:
    """How often each character occurs, in the order in which they occur first.

    Args:
        parts: Parts of lines with a blank in front of each, and how often each part occurs.
    """
    characters = Counter(" ")
    characters[" "] = sum(parts.values())
    for part, number in parts.items():
        for character in part:
            characters[character] += number
    return characters


def learn_from_parts(
    learner: Tokenizer, trainer: trainers.Trainer, parts: Mapping[str, int], unused: str
) -> None:
    """Trains a tokenizer as lines of these parts would.

    The trainers know words and their counts only, and no way to be given these: splitting each part
    once and repeating its words takes a fifth of the time of splitting all lines.

    Args:
        learner: Its normalizer and its pre-tokenizer do to a part what they would do to it within
            any line; changed.
        trainer: Of its model.
        parts: Parts of lines, and how often each occurs.
        unused: A character of none of them.
    """
    words: Counter[str] = Counter()
    for part, number in parts.items():
        for word, _ in learner.pre_tokenizer.pre_tokenize_str(
            learner.normalizer.normalize_str(part)
        ):
            words[word] += number
    learner.normalizer = None
    learner.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(unused)
    blocks = -(-words.total() // _WORDS_AT_A_TIME)
    learner.train_from_iterator(_repeated(words, unused), trainer, length=blocks)


def unused_character(characters: Iterable[str]) -> str:
    """The first character that is none of these."""
    used = set(characters)
    return next(character for character in map(chr, count()) if character not in used)


def _repeated(words: Mapping[str, int], delimiter: str) -> Iterator[str]:
    """Text in which each word occurs as often as it was counted."""
    occurrences = chain.from_iterable(repeat(word, number) for word, number in words.items())
    while block := list(islice(occurrences, _WORDS_AT_A_TIME)):
        yield delimiter.join(block)
