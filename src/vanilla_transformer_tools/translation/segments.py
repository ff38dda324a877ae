"""Lines to token ids, with prefixes; they are cut by sentence, or where they are too long."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat, zip_longest
from typing import TypeVar

from transformers import BatchEncoding, PreTrainedTokenizerBase

from vanilla_transformer.text_vanilla_transformer import AT_ENDS, blank_ends, without_blank_ends
from vanilla_transformer_tools.text.languages import end_length
from vanilla_transformer_tools.text.sentences import sentence_ends, split_line
from vanilla_transformer_tools.text.units import most_frequent, unknown_strings

# Python's replacements for bytes that are not UTF-8; they never occur in text.
_SURROGATES = re.compile("[\ud800-\udfff]")
_WORD_CHARACTER = re.compile(f"[^{AT_ENDS}]")
# No blank follows a sentence of Chinese or Japanese.
_NO_BLANK_AFTER = re.compile(
    "[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003134f]"
)

Text = TypeVar("Text")

# First guess of the characters of a token; most text has fewer.
_CHARACTERS = 8


# A part of a line with the white space around it, and the ids of the text between.
Part = tuple[str, list[int]]


def cut_lines(
    lines: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    *,
    split_sentences: bool = False,
) -> list[list[Part]]:
    """The parts of each line, which together are the line: one, if nothing asks for a cut.

    Args:
        lines: Blank ones have no parts.
        tokenizer: Tokenizer of the lines.
        max_tokens: Length of the longest part, `</s>` counted.
        split_sentences: Whether each sentence is a part of its own.
    """
    split = [sentences_of(line, split_sentences) for line in lines]
    # Very long ones are not tokenised as a whole.
    short = [part for part in chain.from_iterable(split) if len(part) <= _CHARACTERS * max_tokens]
    whole = dict(zip(short, _encode(short, tokenizer), strict=True))

    def cut(sentence: str) -> list[Part]:
        ids = whole.get(sentence)
        if ids is not None and len(ids) <= max_tokens:
            return [(sentence, ids)]
        texts = cut_line(sentence, tokenizer, max_tokens)
        return list(zip(texts, _encode(texts, tokenizer), strict=True))

    return [[part for sentence in sentences for part in cut(sentence)] for sentences in split]


def sentences_of(line: str, split_sentences: bool) -> list[str]:
    """The sentences of a line, or else the line; none if it is blank."""
    if not without_blank_ends(line):
        return []
    return split_line(line) if split_sentences else [line]


def join_pieces(translations: Sequence[str]) -> str:
    """Joins the translations of the pieces of a line, which have the white space around them.

    Where a line had none between two pieces, as in Chinese, there is a blank, unless the
    translation is in such a script.
    """
    line = ""
    for text in translations:
        needs_blank = line and text and not (line[-1].isspace() or text[0].isspace())
        line += " " * bool(needs_blank and not _NO_BLANK_AFTER.match(line[-1])) + text
    return line


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which are no characters and cannot be encoded."""
    return _SURROGATES.sub("\ufffd", text)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not texts:
        return []
    texts = list(map(without_blank_ends, texts))
    ids: list[list[int]] = tokenizer(texts, verbose=False)["input_ids"]
    return ids


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of `<unk>`; None if the tokenizer has none, or it is a token with another purpose too."""
    others = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def unknown_in(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Strings of a text that its vocabulary lacks, one for each occurrence."""
    if unknown_id(tokenizer) not in ids:
        return ()
    return tuple(unknown_strings(tokenizer, [without_blank_ends(text)]).elements())


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids as `skip_special_tokens=True` gives it, but with `<unk>`."""
    added = tokenizer.added_tokens_decoder.items()
    dropped = {*tokenizer.all_special_ids, *(one for one, token in added if token.special)}
    dropped -= {unknown_id(tokenizer)}
    text: str = tokenizer.decode([token for token in ids if token not in dropped])
    return text


def encode_prefix(prefix: str, tokenizer: PreTrainedTokenizerBase, number: int) -> list[int]:
    """Ids that a translation begins with.

    Args:
        prefix: Text; a blank at its end is dropped.
        tokenizer: Tokenizer of the target.
        number: Number of the line, for the error.

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
    guess = _CHARACTERS * max_tokens
    while start < len(line):
        fitting = _end_of_fitting(line, start, guess, tokenizer, max_tokens)
        guess = 2 * (fitting - start)
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


def _end_of_fitting(
    line: str, start: int, guess: int, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> int:
    """End of the longest text from `start` that has at most `max_tokens` tokens.

    The next `guess` characters are searched, and twice as many if all of them fit.
    """

    def encode(end: int) -> BatchEncoding:
        is_fast = tokenizer.is_fast
        return tokenizer(line[start:end], return_offsets_mapping=is_fast, verbose=False)

    while True:
        end = min(start + guess, len(line))
        encoded = encode(end)
        if len(encoded["input_ids"]) > max_tokens:
            break
        if end == len(line):
            return end
        guess *= 2
    if tokenizer.is_fast:
        # The last allowed token is `</s>`, or a code after it.
        fitting, _ = encoded["offset_mapping"][max_tokens - end_length(tokenizer)]
    else:
        # Longer texts are taken to have no fewer tokens.
        ends = range(start + 1, end + 1)
        fitting = bisect_right(ends, max_tokens, key=lambda one: len(encode(one)["input_ids"]))
    return start + max(1, fitting)


def with_prefixes(
    lines: Iterator[Text], prefixes: str | Iterable[str]
) -> Iterator[tuple[Text, str]]:
    """Each line with its prefix.

    Args:
        lines: Text.
        prefixes: One for all lines, or one for each.

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
