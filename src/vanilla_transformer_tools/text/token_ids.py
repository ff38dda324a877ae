"""Token ids of parallel text, and vocabularies that are learned from it.

The ids of a corpus are kept in the cache of `datasets`, in its folder `vanilla_transformer`, under
the digest of all that they depend on. Everything in it may be deleted at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from accelerate import PartialState
from datasets import Dataset, Features, List, Value

from vanilla_transformer.text_vanilla_transformer import as_source, without_blank_ends
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.files import CACHE_VARIABLE, naming_full_disk, scratch_folder
from vanilla_transformer_tools.text.casing import Casing
from vanilla_transformer_tools.text.languages import end_length, language_prefix
from vanilla_transformer_tools.text.parallel_text import (
    COLUMNS,
    ROWS_AT_A_TIME,
    progress_bars_only_on_terminals,
    temporary_room,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

_FEATURES = {
    "input_ids": List(Value("int32")),
    "labels": List(Value("int32")),
    "is_truncated": Value("bool"),
}

# Token ids of source and target.
EncodedPair = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]

# Corpora whose ids are kept; those that were not used for longest are deleted.
MOST_ENTRIES = 8

# Pairs that a vocabulary is learned from. Each different word of them is in memory.
MOST_LEARNED_PAIRS = 2_000_000

# Pairs whose ids are part of a name, for what a tokenizer does not record of itself: languages that
# were chosen for it, or segmentations that it draws at random.
_SAMPLE = 100
_LIBRARIES = ("vanilla-transformer", "transformers", "tokenizers")


def learn_tokenizer(
    pairs: Dataset, columns: Sequence[str], casing: Casing | None = None, **settings: Any
) -> VanillaTransformerTokenizer:
    """A tokenizer that is learned from `source`, `target` or both columns of pairs, in this order.

    Of more than `MOST_LEARNED_PAIRS` pairs, as many are drawn, the same in each run. `casing`
    changes text as in the first epoch; the other settings are those of
    `VanillaTransformerTokenizer.train`.

    Raises:
        ValueError: If the settings of the vocabulary exclude each other or the text.
    """
    lowercase = settings.get("lowercase_sources", False)
    readers: dict[str, Callable[[str], str]]
    readers = {"source": partial(as_source, lowercase=lowercase), "target": without_blank_ends}
    if len(pairs) > MOST_LEARNED_PAIRS:
        rng = np.random.default_rng(0)
        rows = rng.choice(len(pairs), MOST_LEARNED_PAIRS, replace=False, shuffle=False)
        pairs = pairs.select(np.sort(rows))

    def texts() -> Iterator[str]:
        for name in columns:
            lines: Iterable[str]
            lines = chain.from_iterable(table[name].to_pylist() for table in _tables(pairs))
            if casing:
                lines = map(casing.changed, lines, repeat(name), count())
            yield from map(readers[name], lines)

    return VanillaTransformerTokenizer.train(texts(), **settings)


def cached_ids(
    pairs: Dataset, tokenizers: TokenizerPair, *, max_length: int
) -> tuple[Dataset, int]:
    """Token ids of pairs, columns `input_ids` and `labels`, from the cache if they are there.

    Text, tokenizers, `max_length` and the versions of the libraries decide on that. Where the cache
    cannot be written, or `datasets` was told to keep none, they are computed again each time. The
    first process of a machine computes them for all.

    Returns and raises what `tokenize_pairs` does.
    """
    how: dict[str, Any] = {"remove_columns": pairs.column_names}
    folder = _folder()
    if folder is None:
        with temporary_room("the token ids of the pairs"):
            return _count_truncated(_map(pairs, tokenizers, max_length, **how))
    file = folder / f"{_digest(pairs, tokenizers, max_length)}.arrow"
    hint = "Make room there, or set HF_DATASETS_CACHE to a folder with more."
    room = naming_full_disk(folder, "the token ids of the pairs", hint)
    with PartialState().local_main_process_first(), room:
        if not file.exists():
            # On a full disk, `map` would leave what it has written.
            with scratch_folder(folder, ".new-") as scratch:
                new = scratch / file.name
                _map(pairs, tokenizers, max_length, cache_file_name=str(new), **how)
                os.replace(new, file)
        ids = Dataset.from_file(str(file))
    # In a folder of several users, an entry may be somebody else's.
    with suppress(OSError):
        os.utime(file)
    with suppress(OSError):
        for old in sorted(folder.glob("*.arrow"), key=os.path.getmtime)[:-MOST_ENTRIES]:
            old.unlink()
    return _count_truncated(ids)


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
        return _count_truncated(_map(dataset, tokenizers, max_length))


def _map(pairs: Dataset, tokenizers: TokenizerPair, max_length: int, **how: Any) -> Dataset:
    kept = {} if "remove_columns" in how else pairs.features
    with progress_bars_only_on_terminals():
        return pairs.map(
            partial(encode_pairs, tokenizers=tokenizers, max_length=max_length),
            batched=True,
            batch_size=ROWS_AT_A_TIME,
            features=Features(kept | _FEATURES),
            desc="Tokenize",
            # Hashing what the function refers to takes longer than a small corpus.
            new_fingerprint=uuid4().hex,
            **how,
        )


def _count_truncated(tokenized: Dataset) -> tuple[Dataset, int]:
    truncated = sum(pc.sum(table["is_truncated"]).as_py() for table in _tables(tokenized))
    return tokenized.remove_columns("is_truncated"), truncated


def encode_pairs(
    pairs: Mapping[str, list[str]], tokenizers: TokenizerPair, max_length: int
) -> dict[str, list[Any]]:
    """Token ids of pairs in memory, without blank ends, and which pairs were truncated.

    Pairs have columns `source`, `target` and, for several directions, `tag`. The columns returned
    are `input_ids`, `labels` and `is_truncated`.

    Raises:
        ValueError: As `tokenize_pairs` does.
    """
    prefixes = source_prefixes(pairs.get("tag"), len(pairs["source"]), tokenizers)
    shortest = 2 + len(prefixes[0])
    if max_length < shortest:
        raise ValueError(
            f"`max_length` must be at least {shortest}, one token of text and `</s>`"
            f"{' after a tag' * len(prefixes[0])}, got {max_length}."
        )
    # As `Translator` takes them off.
    sources, targets = (list(map(without_blank_ends, pairs[name])) for name in COLUMNS[:2])
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    source = tokenizers.source(sources, **options)["input_ids"]
    target = tokenizers.target(text_target=targets, **options)["input_ids"]
    source = [[*prefix, *ids] for prefix, ids in zip(prefixes, source, strict=True)]
    is_truncated = [max(map(len, pair)) > max_length for pair in zip(source, target, strict=True)]
    # The tokenizer would not count what it truncates, and would keep truncating later texts.
    ends = [end_length(side) for side in (tokenizers.source, tokenizers.target)]
    return {
        "input_ids": [truncate(ids, max_length, ends[0]) for ids in source],
        "labels": [truncate(ids, max_length, ends[1]) for ids in target],
        "is_truncated": is_truncated,
    }


def encoded_rows(
    pairs: Sequence[Sequence[str]], tokenizers: TokenizerPair, max_length: int
) -> tuple[list[EncodedPair], int]:
    """Token ids of each pair, and the number of truncated ones, as `encode_pairs` finds them.

    A pair is source and target, and a tag if there are tags.
    """
    # Without tags, the last name remains unused.
    texts = dict(zip(COLUMNS, map(list, zip(*pairs, strict=True)), strict=False))
    ids = encode_pairs(texts, tokenizers, max_length)
    sides = (map(partial(np.array, dtype=np.int32), ids[name]) for name in ("input_ids", "labels"))
    return list(zip(*sides, strict=True)), sum(ids["is_truncated"])


def source_prefixes(
    languages: Sequence[str] | None, num_pairs: int, tokenizers: TokenizerPair
) -> list[tuple[int, ...]]:
    """Prefix of each source: the tag of its target language, or nothing.

    Without languages, the direction of the tokenizers counts.

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


def truncate(ids: list[int], most: int, end: int = 1) -> list[int]:
    """Keeps at most `most` tokens, among them the last `end`, such as `</s>`."""
    return ids if len(ids) <= most else ids[: most - end] + ids[-end:]


def pair_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of source and target, `[pairs, 2]`, of a dataset from `tokenize_pairs`."""
    names = ["input_ids", "labels"]
    tables = dataset.select_columns(names).with_format("arrow").iter(ROWS_AT_A_TIME)
    parts = [
        np.stack([pc.list_value_length(table[name]).to_numpy() for name in names], axis=1)
        for table in tables
    ]
    return np.concatenate(parts).astype(np.int64)


def _folder() -> Path | None:
    """Where ids are kept; None if they cannot or shall not be."""
    if os.environ.get(CACHE_VARIABLE) == "" or not datasets.is_caching_enabled():
        return None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vanilla_transformer"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _digest(pairs: Dataset, tokenizers: TokenizerPair, max_length: int) -> str:
    """Digest of all that ids depend on: text, tokenizers, and versions of libraries."""
    sample = encode_pairs(pairs[:_SAMPLE], tokenizers, max_length)
    about = [tokenizers.contents, max_length, sample, *map(version, _LIBRARIES)]
    digest = xxhash.xxh3_128(repr(about).encode())
    for table in _tables(pairs):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def _tables(pairs: Dataset) -> Iterator[pa.Table]:
    tables: Iterator[pa.Table] = pairs.with_format("arrow").iter(ROWS_AT_A_TIME)
    return tables
