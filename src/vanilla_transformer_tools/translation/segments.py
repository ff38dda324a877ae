"""Lines to token ids, with prefixes; they are cut by sentence, or where they are too long."""

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, repeat, zip_longest
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.text_vanilla_transformer import AT_ENDS, blank_ends, without_blank_ends
from vanilla_transformer_tools.text.languages import end_length
from vanilla_transformer_tools.text.sentences import sentence_ends, split_line
from vanilla_transformer_tools.text.tokenizer_pair import unknown_id
from vanilla_transformer_tools.text.units import most_frequent, unknown_strings
from vanilla_transformer_tools.translation.results import Translation

logger = logging.getLogger(__name__)

# Python's replacements for bytes that are not UTF-8; they never occur in text.
_SURROGATES = re.compile("[\ud800-\udfff]")
_WORD_CHARACTER = re.compile(f"[^{AT_ENDS}]")
Text = TypeVar("Text")

# First guess of the characters of a token; most text has fewer.
_CHARACTERS = 8


@dataclass(eq=False)
class Piece:
    """A line, or a part of one, as an engine gets it.

    Attributes:
        text: With the white space around it; the pieces of a line are the whole line.
        source: Ids with `</s>`, and with a tag if the model needs one.
        prefix: Ids with which its translation begins.
        unknown: Strings that the vocabulary lacks, one for each occurrence.
        translation: With the white space of the text; None until it is found.
    """

    text: str
    source: list[int]
    prefix: list[int] = field(default_factory=list)
    unknown: tuple[str, ...] = ()
    translation: Translation | None = None


def cut_lines(
    lines: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    *,
    tag: Sequence[int] = (),
    split_sentences: bool = False,
    numbers: Iterable[int] | None = None,
) -> list[list[Piece]]:
    """The pieces of each line, which together are the line: one, if nothing asks for a cut.

    Args:
        lines: Blank ones have no pieces.
        tokenizer: Tokenizer of the lines.
        max_tokens: Length of the longest source, tag and `</s>` counted.
        tag: Ids that each source begins with.
        split_sentences: Whether each sentence is a piece of its own.
        numbers: One for each line, for warnings; None: from 1.
    """
    longest = max_tokens - len(tag)
    split = [_sentences_of(line, split_sentences) for line in lines]
    # Very long ones are not tokenised as a whole.
    short = [text for text in chain.from_iterable(split) if len(text) <= _CHARACTERS * longest]
    ids = dict(zip(short, _encode(short, tokenizer), strict=True))
    rows = []
    for sentences, number in zip(split, numbers or count(1), strict=False):
        texts: list[str] = []
        for sentence in sentences:
            fits = sentence in ids and len(ids[sentence]) <= longest
            texts += [sentence] if fits else cut_line(sentence, tokenizer, longest)
        if len(texts) > max(1, len(sentences)):
            logger.warning(
                "Line %d is longer than %d tokens and is translated in %d pieces.",
                number,
                max_tokens,
                len(texts),
            )
        new = [text for text in texts if text not in ids]
        ids |= zip(new, _encode(new, tokenizer), strict=True)
        rows.append(
            [
                Piece(text, [*tag, *ids[text]], unknown=_unknown_in(text, ids[text], tokenizer))
                for text in texts
            ]
        )
    return rows


def _sentences_of(line: str, split_sentences: bool) -> list[str]:
    """The sentences of a line, or else the line; none if it is blank."""
    if not without_blank_ends(line):
        return []
    return split_line(line) if split_sentences else [line]


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which are no characters and cannot be encoded."""
    return _SURROGATES.sub("\ufffd", text)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    texts = list(map(without_blank_ends, texts))
    ids: list[list[int]] = tokenizer(texts, verbose=False)["input_ids"]
    return ids


def _unknown_in(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Strings of a text that its vocabulary lacks, one for each occurrence."""
    if unknown_id(tokenizer) not in ids:
        return ()
    return tuple(unknown_strings(tokenizer, [without_blank_ends(text)]).elements())


def encode_prefix(prefix: str, tokenizer: PreTrainedTokenizerBase, number: int) -> list[int]:
    """Ids that the translation of a line begins with; a blank at the end of the text is dropped.

    Raises:
        ValueError: If the vocabulary lacks a word of it.
    """
    # A blank between words belongs to the token of the next word.
    prefix = without_surrogates(prefix).rstrip()
    if not prefix:
        return []

    ids: list[int] = tokenizer(text_target=prefix, add_special_tokens=False)["input_ids"]
    # Decoding would leave it out.
    if tokenizer.unk_token_id in ids:
        unknown = unknown_strings(tokenizer, [prefix], "text_target")
        raise ValueError(
            f"The prefix of line {number:,} must be text that the target vocabulary can write, got "
            f"{prefix!r:.60}, in which this is unknown: {most_frequent(unknown)}."
        )
    return ids


def cut_line(line: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[str]:
    """Pieces of a line, of at most `max_tokens` tokens each.

    A piece ends after the last sentence that fits, else before the last blank, else after the last
    token. It has the white space before it, the last one also that after it. Only the text of the
    next few pieces is tokenised at a time, so that time and memory are proportional to the line.

    Args:
        line: Text.
        tokenizer: Tokenizer of the line; a fast one knows the place of each token in the text.
        max_tokens: Length of the longest piece, `</s>` counted. A single character may take more.

    Returns:
        The pieces; none if there are only blanks.
    """

    def fits(text: str) -> bool:
        return len(_encode([text], tokenizer)[0]) <= max_tokens

    pieces = []
    end, start = 0, _next_word(line, 0)
    while start < len(line):
        size = _CHARACTERS * max_tokens
        # Tokens may have more characters than that.
        while (
            end_of := _end_of_fitting(line[start : start + size], tokenizer, max_tokens)
        ) == size:
            size *= 2
        fitting = start + end_of
        boundaries: list[int] = []
        if fitting < len(line):
            boundaries = [*sentence_ends(line, start, fitting)][::-1]
            blanks = (place for place in range(fitting, start, -1) if line[place].isspace())
            boundaries += islice(blanks, 1)
        # A cut within a token makes others of it, which may be more.
        ends = chain(boundaries, range(fitting, start + 1, -1))
        begin, end = end, next((end for end in ends if fits(line[start:end])), start + 1)
        end -= len(blank_ends(line[start:end])[1])
        pieces.append(line[begin:end])
        start = _next_word(line, end)
    if pieces:
        pieces[-1] += line[end:]
    return pieces


def _next_word(line: str, start: int) -> int:
    found = _WORD_CHARACTER.search(line, start)
    return found.start() if found else len(line)


def _end_of_fitting(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> int:
    """End of the longest beginning of a text that has at most `max_tokens` tokens."""
    options = {"return_offsets_mapping": tokenizer.is_fast, "verbose": False}
    encoded = tokenizer(text, **options)
    if len(encoded["input_ids"]) <= max_tokens:
        return len(text)
    if tokenizer.is_fast:
        # The last allowed token is `</s>`, or a code after it.
        end: int = encoded["offset_mapping"][max_tokens - end_length(tokenizer)][0]
        return max(1, end)

    def length(end: int) -> int:
        return len(tokenizer(text[:end], **options)["input_ids"])

    # Longer texts are taken to have no fewer tokens.
    return max(1, bisect_right(range(1, len(text) + 1), max_tokens, key=length))


def with_prefixes(
    lines: Iterator[Text], prefixes: str | Iterable[str]
) -> Iterator[tuple[Text, str]]:
    """Each line with its prefix: one for all lines, or one for each.

    Raises:
        ValueError: After the last pair, if there are more lines than prefixes, or fewer.
    """
    if isinstance(prefixes, str):
        yield from zip(lines, repeat(prefixes))
        return
    for number, (line, prefix) in enumerate(zip_longest(lines, prefixes), start=1):
        if line is None or prefix is None:
            raise ValueError(
                "There must be as many prefixes as lines, got "
                f"{f'more than {number - 1:,}' if line is None else f'only {number - 1:,}'}. "
                "Give one for each, or one for all."
            )
        yield line, prefix
