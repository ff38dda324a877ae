"""Token ids of parallel text, and vocabularies, kept so that another run need not wait for them.

The folder `vanilla_transformer` in the cache of `datasets` has a file for each vocabulary and an
Arrow file for the ids of each corpus, named by all that they depend on. Everything in it may be
deleted at any time.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from accelerate import PartialState
from datasets import Dataset, concatenate_datasets
from datasets.utils import tqdm
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.tokenization_vanilla_transformer import (
    BLANK_SEPARATED,
    WORDS,
    UnicodeForm,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.files import (
    CACHE_VARIABLE,
    delete_oldest,
    mark_used,
    naming_full_disk,
    scratch_file,
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

# Words whose ids are remembered, in about 300 bytes each. Those of the beginning are, and frequent
# words are among them.
_MOST_WORDS = 100_000

_Ids = TypeVar("_Ids", list[int], bytes)
# Size of a packed id.
_BYTES = 4
_TOKENS = pa.list_(pa.int32())
_SCHEMA = pa.schema([("input_ids", _TOKENS), ("labels", _TOKENS), ("is_truncated", pa.bool_())])

# Entries of each kind in the cache; those that were not used for longest are deleted.
MOST_ENTRIES = 8

# Pairs that a vocabulary is learned from. Each different word of them is in memory.
MOST_LEARNED_PAIRS = 2_000_000

# Pairs whose ids are part of a name, for what a tokenizer does not record of itself: languages that
# were chosen for it, or segmentations that it draws at random.
_SAMPLE = 100
_IDS, _VOCABULARY = ".arrow", ".tokenizer"
# Of the file of a vocabulary: checksum, Unicode form, pipeline.
_LAYOUT = 3
_HINT = "Make room there, or set HF_DATASETS_CACHE to a folder with more."
_LIBRARIES = ("vanilla-transformer", "transformers", "tokenizers")


def cached_ids(
    pairs: Dataset, tokenizers: TokenizerPair, *, max_length: int
) -> tuple[Dataset, int]:
    """Token ids of pairs, columns `input_ids` and `labels`, from the cache if they are there.

    Text, tokenizers, `max_length` and the versions of the libraries decide on that. A file appears
    in the cache when it is whole. Where the cache cannot be written, or `datasets` was told to keep
    none, `tokenize_pairs` computes them. The first process of a machine does so for all.

    Args:
        pairs: Pairs from `load_pairs`.
        tokenizers: Tokenizers of source and target.
        max_length: Most tokens that a side keeps, `</s>` counted.

    Returns:
        The dataset, and the number of pairs with a truncated side.

    Raises:
        ValueError: If `max_length` leaves no room for text, or a tag is unknown.
        OSError: If there is no room for the ids.
    """
    folder = _folder()
    if folder is None:
        tokenized, truncated = tokenize_pairs(pairs, tokenizers, max_length=max_length)
        return tokenized.select_columns(["input_ids", "labels"]), truncated
    sample = encode_pairs(pairs[:_SAMPLE], tokenizers, max_length)
    about = [tokenizers.contents, max_length, sample]
    path = folder / (_digest(pairs, pairs.column_names, about) + _IDS)
    with PartialState().local_main_process_first():
        kept = _read_ids(path, len(pairs))
        if kept is None:
            with _new_entry(path, "the token ids of the pairs") as file:
                store_ids(pairs, tokenizers, max_length, file)
            kept = Dataset.from_file(str(path))
    return kept.remove_columns("is_truncated"), count_truncated(kept)


def cached_tokenizer(
    pairs: Dataset, columns: Sequence[str], **settings: Any
) -> VanillaTransformerTokenizer:
    """A tokenizer that is learned from columns of pairs, from the cache if it is there.

    Of more than `MOST_LEARNED_PAIRS` pairs, as many are drawn, the same in each run. Text, settings
    and the versions of the libraries decide which file is read; the rest is as for `cached_ids`.

    Args:
        pairs: Pairs from `load_pairs`.
        columns: `source`, `target` or both, whose text is read in this order.
        settings: Arguments of `VanillaTransformerTokenizer.train`.

    Raises:
        ValueError: If the settings of the vocabulary exclude each other or the text.
        OSError: If there is no room for the vocabulary.
    """
    texts, folder = _drawn_texts(pairs, columns), _folder()
    if folder is None:
        return VanillaTransformerTokenizer.train(texts, **settings)
    about = [_LAYOUT, MOST_LEARNED_PAIRS, *sorted(settings.items())]
    path = folder / (_digest(pairs, columns, about) + _VOCABULARY)
    with PartialState().local_main_process_first():
        kept = _read_tokenizer(path)
        if kept is None:
            kept = VanillaTransformerTokenizer.train(texts, **settings)
            # None where the texts are already written in the form of the settings.
            form = kept.init_kwargs.get("unicode_form", "")
            content = f"{form}\n{kept.backend_tokenizer.to_str()}"
            with _new_entry(path, "the vocabulary") as file:
                file.write_text(f"{_checksum(content)}\n{content}", encoding="utf-8", newline="\n")
    return kept


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
                yield pa.record_batch(encoder(table.to_pydict()), schema=_SCHEMA)
                bar.update(len(table))

    with progress_bars_only_on_terminals():
        return store(batches(), _SCHEMA, file)


def count_truncated(tokenized: Dataset) -> int:
    """Number of pairs with a truncated side, of a dataset from `store_ids`."""
    tables = tokenized.select_columns("is_truncated").with_format("arrow").iter(ROWS_AT_A_TIME)
    return sum(pc.sum(table["is_truncated"]).as_py() for table in tables)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Lists of ids form no cycles, and looking for some would take as long as making the lists."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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

    @_without_garbage_collection()
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
        source, target = self._source(sources), self._target(targets)
        if prefixes[0]:
            source = [_packed(prefix) + ids for prefix, ids in zip(prefixes, source, strict=True)]
        most = _BYTES * max_length
        is_truncated = [max(map(len, pair)) > most for pair in zip(source, target, strict=True)]
        # The tokenizer would not count what it truncates, and would keep truncating later texts.
        ends = [end_length(side) for side in (self._tokenizers.source, self._tokenizers.target)]
        return {
            "input_ids": _in_arrow([truncate(ids, most, _BYTES * ends[0]) for ids in source]),
            "labels": _in_arrow([truncate(ids, most, _BYTES * ends[1]) for ids in target]),
            "is_truncated": pa.array(is_truncated),
        }


def encode_pairs(
    pairs: Mapping[str, list[str]], tokenizers: TokenizerPair, max_length: int
) -> dict[str, list[Any]]:
    """As `PairEncoder` for a single batch, in lists."""
    columns = PairEncoder(tokenizers, max_length)(pairs)
    return {name: column.to_pylist() for name, column in columns.items()}


def _packed(ids: Sequence[int]) -> bytes:
    """Ids as 32-bit numbers one after another, which are joined in less time than lists."""
    return np.array(ids, np.int32).tobytes()


def _in_arrow(lines: list[bytes]) -> pa.ListArray:
    """The packed ids of each line, as a column."""
    offsets = np.cumsum([0, *map(len, lines)]) // _BYTES
    ids = np.frombuffer(b"".join(lines), np.int32)
    return pa.ListArray.from_arrays(offsets.astype(np.int32), ids)


class _ByWords:
    """Encodes by a tokenizer of ours whose words do not depend on each other, each word once.

    Splitting a line into words takes the tokenizer most of its time.
    """

    def __init__(self, tokenizer: VanillaTransformerTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, bytes] = {}

    def __call__(self, lines: list[str]) -> list[bytes]:
        rows = list(map(self._tokenizer.independent_parts, lines))
        unseen = list({*chain.from_iterable(rows)} - self._ids.keys())
        # Tokenizers refuse to encode nothing.
        if unseen:
            options = {"add_special_tokens": False, "return_attention_mask": False}
            encoded = self._tokenizer(unseen, verbose=False, **options)["input_ids"]
            self._ids.update(zip(unseen, map(_packed, encoded), strict=True))
        ids_of, end = self._ids.__getitem__, _packed([self._tokenizer.eos_token_id])
        ids = [b"".join(map(ids_of, row)) + end for row in rows]
        if len(self._ids) > _MOST_WORDS:
            for word in unseen:
                del self._ids[word]
        return ids


def _by_lines(tokenizer: PreTrainedTokenizerBase, argument: str, lines: list[str]) -> list[bytes]:
    """Encodes with any tokenizer, which is called on whole lines."""
    options = {argument: lines, "return_attention_mask": False, "verbose": False}
    return list(map(_packed, tokenizer(**options)["input_ids"]))


def _line_encoder(
    tokenizer: PreTrainedTokenizerBase, argument: str
) -> Callable[[list[str]], list[bytes]]:
    if isinstance(tokenizer, VanillaTransformerTokenizer) and has_independent_parts(tokenizer):
        return _ByWords(tokenizer)
    return partial(_by_lines, tokenizer, argument)


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


def truncate(ids: _Ids, most: int, end: int = 1) -> _Ids:
    """Keeps at most `most` tokens or bytes, among them the last `end`, such as `</s>`."""
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


def _drawn_texts(pairs: Dataset, columns: Sequence[str]) -> Iterator[str]:
    """Texts of one column after the other, of all pairs or of those that are drawn."""
    drawn = np.ones(len(pairs), bool)
    if len(pairs) > MOST_LEARNED_PAIRS:
        rng = np.random.default_rng(0)
        drawn[:] = False
        drawn[rng.choice(len(pairs), MOST_LEARNED_PAIRS, replace=False, shuffle=False)] = True
    for name in columns:
        first = 0
        for table in _tables(pairs):
            yield from table[name].filter(drawn[first : first + len(table)]).to_pylist()
            first += len(table)


def _folder() -> Path | None:
    """Where ids are kept; None if they cannot or shall not be."""
    if os.environ.get(CACHE_VARIABLE) == "" or not datasets.is_caching_enabled():
        return None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vanilla_transformer"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextmanager
def _new_entry(path: Path, purpose: str) -> Iterator[Path]:
    """Where to write an entry, which appears when it is whole; old ones of its kind are deleted."""
    folder = path.parent
    with naming_full_disk(folder, purpose, _HINT), scratch_file(folder, ".new-") as file:
        yield file
        os.replace(file, path)
    delete_oldest(folder.glob(f"*{path.suffix}"), MOST_ENTRIES)


def _digest(pairs: Dataset, columns: Sequence[str], about: Sequence[Any]) -> str:
    """Digest of all that an entry depends on: text, the versions of libraries, and more."""
    digest = xxhash.xxh3_128()
    digest.update(repr([*about, *map(version, _LIBRARIES)]).encode())
    for table in _tables(pairs):
        for name in columns:
            for text in table[name].chunks:
                # The lengths decide where a text ends.
                digest.update(pc.binary_length(text).to_numpy())
                whole = pa.ListArray.from_arrays([0, len(text)], text)
                digest.update(pc.binary_join(whole, "")[0].as_buffer())
    return digest.hexdigest()


def _tables(pairs: Dataset) -> Iterator[pa.Table]:
    tables: Iterator[pa.Table] = pairs.with_format("arrow").iter(ROWS_AT_A_TIME)
    return tables


def _checksum(content: str) -> str:
    return xxhash.xxh3_128_hexdigest(content.encode())


def _read_ids(path: Path, num_pairs: int) -> Dataset | None:
    """The ids in a file, which becomes the one last used; None if it is not there or not whole."""
    try:
        kept = Dataset.from_file(str(path))
    except (OSError, pa.ArrowException):
        return None
    mark_used(path)
    return kept if len(kept) == num_pairs else None


def _read_tokenizer(path: Path) -> VanillaTransformerTokenizer | None:
    """As `_read_ids`; also None if the file was changed."""
    try:
        checksum, _, content = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    if checksum != _checksum(content):
        return None
    mark_used(path)
    form, _, pipeline = content.partition("\n")
    backend = Tokenizer.from_str(pipeline)
    added = sorted(backend.get_added_tokens_decoder().items())
    special_tokens = [token.content for _, token in added if token.special]
    return VanillaTransformerTokenizer.of_pipeline(
        backend, special_tokens, cast("UnicodeForm | None", form or None)
    )
