"""Token ids of parallel text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets
from datasets.utils import tqdm
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.tokenization_vanilla_transformer import (
    BLANK_SEPARATED,
    WORDS,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.parallel_text import (
    COLUMNS,
    ROWS_AT_A_TIME,
    progress_bars_only_on_terminals,
    store,
    temporary_room,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, end_length, language_prefix

# Words whose ids are remembered, in about 200 bytes each. Those of the beginning are, and frequent
# words are among them.
_MOST_WORDS = 100_000

# White space that `independent_parts` leaves together; RE2 has no other name for all of it.
_SPACE = (
    r"[\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]"
)
_WIDE_SPACE = rf"\A{_SPACE}|{_SPACE}{{2}}|{_SPACE}\z"

# A word, or the ids of what surrounds the text of a line.
_Word = str | tuple[int, ...]

_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema([("input_ids", _IDS), ("labels", _IDS), ("is_truncated", pa.bool_())])


def tokenize_pairs(
    dataset: Dataset, tokenizers: TokenizerPair, *, max_length: int
) -> tuple[Dataset, int]:
    """Adds the token ids as columns `input_ids` and `labels`, and counts truncated pairs.

    Args:
        dataset: Pairs as `load_pairs` returns them.
        tokenizers: Tokenizers. Truncation keeps their last token, `</s>`, and the tag of
            the target language before the source.
        max_length: Most tokens that a side keeps, `</s>` counted.

    Returns:
        The dataset, and the number of pairs with a truncated side.

    Raises:
        ValueError: If `max_length` leaves no room for text, or a tag is none of the tokenizer's.
        OSError: If there is no room for the ids.
    """
    with temporary_room("the token ids of the pairs"):
        ids = store_ids(dataset, tokenizers, max_length)
    tokenized = concatenate_datasets([dataset, ids.remove_columns("is_truncated")], axis=1)
    return tokenized, count_truncated(ids)


def store_ids(
    dataset: Dataset, tokenizers: TokenizerPair, max_length: int, file: Path | None = None
) -> Dataset:
    """The columns of `PairEncoder`, in an Arrow file.

    Args:
        dataset: Pairs.
        tokenizers: Tokenizers of source and target.
        max_length: Most tokens that a side keeps, `</s>` counted.
        file: Where to write them; None: next to the temporary copy of the pairs.

    Raises:
        ValueError: If `max_length` leaves no room for text, or a tag is unknown.
        OSError: If there is no room, in words of the system.
    """
    encoder = PairEncoder(tokenizers, max_length)

    def batches() -> Iterator[pa.RecordBatch]:
        with tqdm(total=len(dataset), desc="Tokenize", unit=" pairs") as bar:
            for table in dataset.with_format("arrow").iter(ROWS_AT_A_TIME):
                columns = encoder(table.to_pydict())
                yield pa.record_batch(columns, schema=_SCHEMA)
                bar.update(len(table))

    with progress_bars_only_on_terminals():
        return store(batches(), _SCHEMA, file)


def count_truncated(tokenized: Dataset) -> int:
    """Number of pairs with a truncated side, of a dataset from `store_ids`."""
    tables = tokenized.select_columns("is_truncated").with_format("arrow").iter(ROWS_AT_A_TIME)
    return sum(pc.sum(table["is_truncated"]).as_py() for table in tables)


class PairEncoder:
    """Converts pairs into token ids, one batch after another, faster the more words it has seen.

    Args:
        tokenizers: Tokenizers of source and target.
        max_length: Most tokens that a side keeps, `</s>` counted.
    """

    def __init__(self, tokenizers: TokenizerPair, max_length: int) -> None:
        self._tokenizers = tokenizers
        self._max_length = max_length
        self._source = _line_encoder(tokenizers.source, "text")
        self._target = self._source
        if not (tokenizers.is_joint and isinstance(self._source, _ByWords)):
            self._target = _line_encoder(tokenizers.target, "text_target")

    def __call__(self, pairs: Mapping[str, list[str]]) -> dict[str, pa.Array]:
        """Token ids of pairs in memory, without blank ends, and which pairs were truncated.

        Args:
            pairs: Columns `source`, `target` and, for several directions, `tag`.

        Returns:
            Columns `input_ids`, `labels` and `is_truncated`.

        Raises:
            ValueError: If `max_length` leaves no room for text, or a tag is unknown.
        """
        prefixes = source_prefixes(pairs.get("tag"), len(pairs["source"]), self._tokenizers)
        shortest, max_length = 2 + len(prefixes[0]), self._max_length
        if max_length < shortest:
            raise ValueError(
                f"`max_length` must be at least {shortest}, one token of text and `</s>`"
                f"{' after a tag' * len(prefixes[0])}, got {max_length}."
            )
        # As `Translator` takes them off.
        sources, targets = (list(map(without_blank_ends, pairs[name])) for name in COLUMNS[:2])
        source = self._source.encode(sources, prefixes)
        target = self._target.encode(targets, [()] * len(targets))
        ends = [end_length(side) for side in (self._tokenizers.source, self._tokenizers.target)]
        # The tokenizer would not count what it truncates, and would keep truncating later texts.
        return {
            "input_ids": source.truncated(max_length, ends[0]).in_arrow(),
            "labels": target.truncated(max_length, ends[1]).in_arrow(),
            "is_truncated": pa.array(np.maximum(source.lengths, target.lengths) > max_length),
        }


def encode_pairs(
    pairs: Mapping[str, list[str]], tokenizers: TokenizerPair, max_length: int
) -> dict[str, list[Any]]:
    """As `PairEncoder` for a single batch, in lists."""
    columns = PairEncoder(tokenizers, max_length)(pairs)
    return {name: column.to_pylist() for name, column in columns.items()}


@dataclass(frozen=True)
class _Lines:
    """Token ids of several lines, one after another, and their number in each line."""

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]

    def truncated(self, max_length: int, end: int) -> _Lines:
        """Each line as `truncate` returns it."""
        if self.lengths.max() <= max_length:
            return self
        starts = np.cumsum(self.lengths) - self.lengths
        places = np.arange(len(self.ids)) - np.repeat(starts, self.lengths)
        left = np.repeat(self.lengths, self.lengths) - places
        kept = (places < max_length - end) | (left <= end)
        return _Lines(self.ids[kept], np.minimum(self.lengths, max_length))

    def in_arrow(self) -> pa.ListArray:
        offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, self.ids)


class _ByLines:
    """Any tokenizer, which is called on whole lines."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, argument: str) -> None:
        self._tokenizer = tokenizer
        self._argument = argument

    def encode(self, lines: list[str], prefixes: Sequence[tuple[int, ...]]) -> _Lines:
        options = {self._argument: lines, "return_attention_mask": False, "verbose": False}
        encoded = self._tokenizer(**options)["input_ids"]
        return _joined([[*prefix, *ids] for prefix, ids in zip(prefixes, encoded, strict=True)])


class _ByWords:
    """A tokenizer of ours whose words do not depend on each other: each is tokenised once.

    Splitting a line into words takes the tokenizer most of its time.
    """

    def __init__(self, tokenizer: VanillaTransformerTokenizer) -> None:
        self._tokenizer = tokenizer
        self._numbers = _Numbers()
        self._ids = np.empty(0, np.int32)
        # Where the ids of a word begin, by its number, and after all of them their end.
        self._starts = np.zeros(1, np.int64)

    def encode(self, lines: list[str], prefixes: Sequence[tuple[int, ...]]) -> _Lines:
        known = len(self._numbers)
        numbers, sizes = self._numbered(lines, prefixes)
        unseen = list(islice(self._numbers, known, None))
        if unseen:
            self._learn(unseen)
        starts = self._starts[numbers]
        lengths = self._starts[numbers + 1] - starts
        places = np.arange(lengths.sum())
        places += np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        encoded = _Lines(self._ids[places], np.add.reduceat(lengths, np.cumsum(sizes) - sizes))
        if len(self._numbers) > _MOST_WORDS:
            self._forget(unseen)
        return encoded

    def _numbered(
        self, lines: list[str], prefixes: Sequence[tuple[int, ...]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers of the words of all lines, and of how many words each line consists.

        What surrounds the text of a line counts as two words, which consist of their ids.
        """
        # As `independent_parts`, for all lines at once.
        texts = pa.array(lines, pa.string())
        is_whole = pc.match_substring_regex(texts, _WIDE_SPACE)
        split = pc.split_pattern(texts.filter(pc.invert(is_whole)), " ")
        is_whole = is_whole.to_numpy(zero_copy_only=False)
        sizes = np.full(len(lines), 3)
        sizes[~is_whole] = 2 + pc.list_value_length(split).to_numpy()
        ends = np.cumsum(sizes)
        words = np.full(ends[-1], True)
        words[ends - sizes] = words[ends - 1] = False
        in_whole = np.repeat(is_whole, sizes) & words

        number_of = self._numbers.__getitem__
        numbers = np.empty(len(words), np.int64)
        numbers[ends - sizes] = np.fromiter(map(number_of, prefixes), np.int64, len(lines))
        numbers[ends - 1] = number_of((self._tokenizer.eos_token_id,))
        wholes = texts.filter(pa.array(is_whole)).to_pylist()
        numbers[in_whole] = np.fromiter(map(number_of, wholes), np.int64, len(wholes))
        found = split.flatten().dictionary_encode()
        different = found.dictionary.to_pylist()
        numbers_of = np.fromiter(map(number_of, different), np.int64, len(different))
        numbers[words & ~in_whole] = numbers_of[found.indices.to_numpy()]
        return numbers, sizes

    def _learn(self, unseen: list[_Word]) -> None:
        texts = [word for word in unseen if isinstance(word, str)]
        encoded: Iterator[list[int]] = iter(())
        # Tokenizers refuse to encode nothing.
        if texts:
            options = {"add_special_tokens": False, "return_attention_mask": False}
            encoded = iter(self._tokenizer(texts, verbose=False, **options)["input_ids"])
        learned = _joined([next(encoded) if isinstance(word, str) else word for word in unseen])
        self._starts = np.append(self._starts, self._starts[-1] + np.cumsum(learned.lengths))
        self._ids = np.append(self._ids, learned.ids)

    def _forget(self, unseen: list[_Word]) -> None:
        for word in unseen:
            del self._numbers[word]
        self._starts = self._starts[: len(self._numbers) + 1]
        self._ids = self._ids[: self._starts[-1]]


class _Numbers(dict[_Word, int]):
    """Words, numbered in the order in which they are looked up for the first time."""

    def __missing__(self, word: _Word) -> int:
        number = self[word] = len(self)
        return number


def _joined(lines: Sequence[Sequence[int]]) -> _Lines:
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    return _Lines(np.fromiter(chain.from_iterable(lines), np.int32, lengths.sum()), lengths)


def _line_encoder(tokenizer: PreTrainedTokenizerBase, argument: str) -> _ByLines | _ByWords:
    if isinstance(tokenizer, VanillaTransformerTokenizer) and has_independent_parts(tokenizer):
        return _ByWords(tokenizer)
    return _ByLines(tokenizer, argument)


def has_independent_parts(tokenizer: VanillaTransformerTokenizer) -> bool:
    """Whether the ids of a line are the ids of its `independent_parts`, and `</s>` after them.

    It is so for pieces of words without a Unicode form, which may write blanks again, and without
    tokens that a text can spell or BPE-dropout.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    boundaries = (backend["pre_tokenizer"] or {}).get("pretokenizers") or [{}]
    normalizer = backend["normalizer"] or {}
    return bool(
        boundaries[-1].get("pattern") in [{"Regex": WORDS}, {"Regex": BLANK_SEPARATED}]
        and {step["type"] for step in normalizer.get("normalizers", [normalizer])} == {"Replace"}
        and backend["model"].get("dropout") is None
        and tokenizer.split_special_tokens
        and all(token.special for token in tokenizer.added_tokens_decoder.values())
        and tokenizer("")["input_ids"] == [tokenizer.eos_token_id]
    )


def unknown_strings(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Counter[str]:
    """Strings in `texts` that become `<unk>`, with the number of times each occurs."""
    counts: Counter[str] = Counter()
    remaining = iter(texts)
    while chunk := list(islice(remaining, 1000)):
        encoded = tokenizer(
            chunk, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for text, ids, offsets in zip(
            chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            counts.update(
                text[start:end]
                for token_id, (start, end) in zip(ids, offsets, strict=True)
                if token_id == tokenizer.unk_token_id
            )
    return counts


def source_prefixes(
    languages: Sequence[str] | None, num_pairs: int, tokenizers: TokenizerPair
) -> list[tuple[int, ...]]:
    """Prefix of each source: the tag of its target language, or nothing.

    Args:
        languages: One for each pair; None: the direction of the tokenizers.
        num_pairs: Number of pairs.
        tokenizers: Tokenizers of the pairs.

    Raises:
        ValueError: If the tokenizer lacks a language, or has languages and none is given.
    """
    if languages is None and tokenizers.source_prefix:
        return [tokenizers.source_prefix] * num_pairs
    named: Sequence[str | None] = [None] * num_pairs if languages is None else languages
    prefixes = {
        language: tuple(language_prefix(tokenizers.source, language)) for language in set(named)
    }
    return [prefixes[language] for language in named]


def truncate(ids: list[int], max_length: int) -> list[int]:
    """Keeps at most `max_length` tokens, including `</s>` at the end."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]


def pair_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of source and target, `[pairs, 2]`, of a dataset from `tokenize_pairs`."""
    names = ["input_ids", "labels"]
    tables = dataset.select_columns(names).with_format("arrow").iter(ROWS_AT_A_TIME)
    parts = [
        np.stack([pc.list_value_length(table[name]).to_numpy() for name in names], axis=1)
        for table in tables
    ]
    return np.concatenate(parts).astype(np.int64)
