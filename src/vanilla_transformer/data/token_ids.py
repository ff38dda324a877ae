"""Token ids of parallel text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.data.parallel_text import (
    progress_bars_only_on_terminals,
    temporary_room,
)
from vanilla_transformer.tokenization.languages import end_length, language_prefix
from vanilla_transformer.tokenization.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
)
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair

# Words whose ids are remembered, in about 400 bytes each. Those of the beginning are, and frequent
# words are among them.
_MOST_WORDS = 100_000

_ROWS_AT_A_TIME = 10_000
_IDS = datasets.Sequence(Value("int32"))
_FEATURES = {"input_ids": _IDS, "labels": _IDS, "is_truncated": Value("bool")}


def tokenize_pairs(
    dataset: Dataset, tokenizers: TokenizerPair, *, max_length: int
) -> tuple[Dataset, int]:
    """Adds the token ids as columns `input_ids` and `labels`, and counts truncated pairs.

    Args:
        dataset: Pairs as `load_pairs` returns them.
        tokenizers: Of source and target. Truncation keeps their last token, `</s>`, and the tag of
            the target language before the source.
        max_length: Most tokens that a side keeps, `</s>` counted.

    Returns:
        The dataset, and the number of pairs with a truncated side.

    Raises:
        ValueError: If `max_length` leaves no room for text, or a tag is none of the tokenizer's.
        OSError: If there is no room for the ids.
    """
    with temporary_room("the token ids of the pairs"):
        tokenized = map_to_ids(dataset, tokenizers, max_length)
    return tokenized.remove_columns("is_truncated"), count_truncated(tokenized)


def map_to_ids(
    dataset: Dataset, tokenizers: TokenizerPair, max_length: int, file: Path | None = None
) -> Dataset:
    """Adds the columns of `encode_pairs`.

    Args:
        dataset: Pairs.
        tokenizers: As for `tokenize_pairs`.
        max_length: As for `tokenize_pairs`.
        file: Where to write them, without the text; None: with the text, beside that of the pairs.

    Raises:
        ValueError: As `tokenize_pairs`.
        OSError: If there is no room, in words of the system.
    """
    place: dict[str, Any] = {}
    if file:
        place = {
            "cache_file_name": str(file),
            # Otherwise `datasets` would hash the tokenizers.
            "new_fingerprint": file.stem,
            "remove_columns": dataset.column_names,
        }
    kept = {} if file else dataset.features
    with progress_bars_only_on_terminals():
        return dataset.map(
            PairEncoder(tokenizers, max_length),
            batched=True,
            load_from_cache_file=False,
            features=Features({**kept, **_FEATURES}),
            desc="Tokenize",
            **place,
        )


def count_truncated(tokenized: Dataset) -> int:
    """Number of pairs with a truncated side, of a dataset from `map_to_ids`."""
    tables = tokenized.select_columns("is_truncated").with_format("arrow").iter(_ROWS_AT_A_TIME)
    return sum(pc.sum(table["is_truncated"]).as_py() for table in tables)


class PairEncoder:
    """Converts pairs into token ids, one batch after another, faster the more words it has seen.

    Args:
        tokenizers: As for `tokenize_pairs`.
        max_length: As for `tokenize_pairs`.
    """

    def __init__(self, tokenizers: TokenizerPair, max_length: int) -> None:
        self._tokenizers = tokenizers
        self._max_length = max_length
        self._source = _line_encoder(tokenizers.source, "text")
        self._target = self._source
        if not (tokenizers.is_joint and isinstance(self._source, _ByWords)):
            self._target = _line_encoder(tokenizers.target, "text_target")

    def __call__(self, pairs: Mapping[str, list[str]]) -> dict[str, list[Any]]:
        """Token ids of pairs in memory, and which pairs were truncated.

        Args:
            pairs: Columns `source`, `target` and, for several directions, `tag`.

        Returns:
            Columns `input_ids`, `labels` and `is_truncated`.

        Raises:
            ValueError: If `max_length` leaves no room for text, or a tag is none of the
                tokenizer's.
        """
        prefixes = source_prefixes(pairs.get("tag"), len(pairs["source"]), self._tokenizers)
        shortest, max_length = 2 + len(prefixes[0]), self._max_length
        if max_length < shortest:
            raise ValueError(
                f"`max_length` must be at least {shortest}, one token of text and `</s>`"
                f"{' after a tag' * len(prefixes[0])}, got {max_length}."
            )
        encoded = self._source.encode(pairs["source"])
        targets = self._target.encode(pairs["target"])
        sources = [[*prefix, *ids] for prefix, ids in zip(prefixes, encoded, strict=True)]
        ends = [end_length(side) for side in (self._tokenizers.source, self._tokenizers.target)]
        # The tokenizer would not count what it truncates, and would keep truncating later texts.
        return {
            "input_ids": [truncate(ids, max_length, ends[0]) for ids in sources],
            "labels": [truncate(ids, max_length, ends[1]) for ids in targets],
            "is_truncated": [
                max(len(source), len(target)) > max_length
                for source, target in zip(sources, targets, strict=True)
            ],
        }


def encode_pairs(
    pairs: Mapping[str, list[str]], tokenizers: TokenizerPair, max_length: int
) -> dict[str, list[Any]]:
    """As `PairEncoder` for a single batch."""
    return PairEncoder(tokenizers, max_length)(pairs)


class _ByLines:
    """Any tokenizer, which is called on whole lines."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, argument: str) -> None:
        self._tokenizer = tokenizer
        self._argument = argument

    def encode(self, lines: list[str]) -> list[list[int]]:
        options = {self._argument: lines, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self._tokenizer(**options)["input_ids"]
        return ids


class _ByWords:
    """A tokenizer of ours whose words do not depend on each other: each is tokenised once.

    Splitting a line into words takes the tokenizer most of its time.
    """

    def __init__(self, tokenizer: VanillaTransformerTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def encode(self, lines: list[str]) -> list[list[int]]:
        parts_of = [self._tokenizer.independent_parts(line) for line in lines]
        unseen = list(set(chain.from_iterable(parts_of)).difference(self._ids))
        # Tokenizers refuse to encode nothing.
        if unseen:
            encoded = self._tokenizer(
                unseen, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            self._ids.update(zip(unseen, encoded["input_ids"], strict=True))
        ids_of, end = self._ids.__getitem__, self._tokenizer.eos_token_id
        lines_of_ids = [[*chain.from_iterable(map(ids_of, parts)), end] for parts in parts_of]
        if len(self._ids) > _MOST_WORDS:
            for part in unseen:
                del self._ids[part]
        return lines_of_ids


def _line_encoder(tokenizer: PreTrainedTokenizerBase, argument: str) -> _ByLines | _ByWords:
    if isinstance(tokenizer, VanillaTransformerTokenizer) and tokenizer.has_independent_parts():
        return _ByWords(tokenizer)
    return _ByLines(tokenizer, argument)


def source_prefixes(
    languages: Sequence[str] | None, num_pairs: int, tokenizers: TokenizerPair
) -> list[list[int]]:
    """Prefix of each source: the tag of its target language, or nothing.

    Args:
        languages: One for each pair; None for a single direction, that of the tokenizers.
        num_pairs: Number of pairs.
        tokenizers: Of the pairs.

    Raises:
        ValueError: If the tokenizer lacks a language, or has languages and none is given.
    """
    if languages is None and tokenizers.source_prefix:
        return [list(tokenizers.source_prefix)] * num_pairs
    named: Sequence[str | None] = [None] * num_pairs if languages is None else languages
    prefixes = {language: language_prefix(tokenizers.source, language) for language in set(named)}
    return [prefixes[language] for language in named]


def truncate(ids: list[int], max_length: int, end: int = 1) -> list[int]:
    """Keeps at most `max_length` tokens, including the last `end`, `</s>` among them."""
    return ids if len(ids) <= max_length else ids[: max_length - end] + ids[-end:]


def pair_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of source and target, `[pairs, 2]`, of a dataset from `tokenize_pairs`."""
    names = ["input_ids", "labels"]
    tables = dataset.select_columns(names).with_format("arrow").iter(_ROWS_AT_A_TIME)
    parts = [
        np.stack([pc.list_value_length(table[name]).to_numpy() for name in names], axis=1)
        for table in tables
    ]
    return np.concatenate(parts).astype(np.int64)
