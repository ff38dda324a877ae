"""Parallel text: pairs from files or `datasets`, their token ids, and batches of a token budget."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.tokenization_vanilla_transformer import read_lines

_SCHEMA = pa.schema([("source", pa.string()), ("target", pa.string())])
_ROWS_AT_A_TIME = 10_000
# JSON can spell half of a surrogate pair, which is no character.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ParallelText:
    """Where the pairs of one split are found.

    Attributes:
        paths: Two plain text files, source and target, one sentence a line; or one `.tsv` file
            (source, tab, target; no header, no quoting), `.jsonl` or `.json` file (one object a
            line), `.parquet` file, folder written by `datasets`' `save_to_disk`, or name of a
            dataset, local or on the Hub. All text files may be gzipped.
        source_column: Column of the source, where columns have names. A dot reaches into nested
            columns: `translation.de`.
        target_column: Column of the target, likewise.
        config_name: Configuration of a dataset that has several.
        split: Split of a dataset that has several.

    Raises:
        ValueError: If there are neither one nor two paths.
    """

    paths: tuple[str, ...]
    source_column: str = "source"
    target_column: str = "target"
    config_name: str | None = None
    split: str = "train"

    def __post_init__(self) -> None:
        if len(self.paths) not in (1, 2):
            raise ValueError(
                "`paths` must hold two files, one per side, or one file or dataset that holds "
                f"both, got {self.paths!r}."
            )

    @property
    def columns(self) -> tuple[str, str]:
        """Names of the source and the target column."""
        return self.source_column, self.target_column

    def __str__(self) -> str:
        """The paths as errors name them."""
        return " and ".join(map(repr, self.paths))


def load_pairs(text: ParallelText) -> Dataset:
    """All pairs as text: columns `source` and `target`, in the order of the file, nothing altered.

    The pairs are copied to a temporary Arrow file, which is memory-mapped and is deleted when the
    process ends. A corpus may thus be larger than the memory, no later change of its files can
    meet an old cache, and what `Dataset.map` writes beside its input is deleted with it.

    Raises:
        FileNotFoundError: If a file or dataset does not exist.
        ValueError: If the files have different numbers of lines, the kind of file is unknown, a
            column is missing, a cell holds no text, or there are no pairs at all.
    """
    pairs = _read_two_files(text) if len(text.paths) == 2 else _read_one_path(text)
    dataset = _store(pairs)
    if len(dataset) == 0:
        raise ValueError(f"{text} is empty: expected at least one pair.")
    return dataset


def _store(pairs: Iterator[tuple[str, str]]) -> Dataset:
    handle, path = tempfile.mkstemp(suffix=".arrow", dir=_temporary_folder())
    os.close(handle)
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        while rows := list(islice(pairs, _ROWS_AT_A_TIME)):
            columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    return Dataset.from_file(path)


@functools.cache
def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="vanilla_transformer_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read_two_files(text: ParallelText) -> Iterator[tuple[str, str]]:
    for path in text.paths:
        if _suffix(path) in _READERS:
            raise ValueError(
                "Two files must be plain text, one per side, but such a file holds both sides: "
                f"{path!r}. Give it alone."
            )
    source_path, target_path = text.paths
    counts = [0, 0]
    for source, target in zip_longest(read_lines(source_path), read_lines(target_path)):
        counts[0] += source is not None
        counts[1] += target is not None
        if source is not None and target is not None:
            yield source, target
    if counts[0] != counts[1]:
        longer = text.paths[counts[1] > counts[0]]
        raise ValueError(
            f"The two sides must have the same number of lines, got {counts[0]:,} in "
            f"{source_path!r} and {counts[1]:,} in {target_path!r}: {longer!r} is longer by "
            f"{abs(counts[0] - counts[1]):,}. Look for the first pair that does not fit together."
        )


def _read_one_path(text: ParallelText) -> Iterator[tuple[str, str]]:
    (path,) = text.paths
    reader = _READERS.get(_suffix(path))
    if os.path.isfile(path):
        if reader is None:
            raise ValueError(
                f"{path!r} is of unknown kind {_suffix(path)!r}: one file that holds both sides "
                f"must be one of {', '.join(_READERS)}. For plain text give two files."
            )
        return reader(text)
    if reader is not None and not os.path.isdir(path):
        raise FileNotFoundError(f"There is no file {path!r}.")
    return _read_dataset(text)


def _read_tsv(text: ParallelText) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(text.paths[0]), start=1):
        cells = line.split("\t")
        if len(cells) != 2:
            raise ValueError(
                f"Line {number} of {text} must be source, tab, target, got {len(cells) - 1} tabs. "
                "To keep two columns of more: cut -f 1,2 old.tsv > new.tsv"
            )
        yield cells[0], cells[1]


def _read_json_lines(text: ParallelText) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(text.paths[0]), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Line {number} of {text} must be a JSON object, got {line[:60]!r}: {error}."
            ) from error
        if not isinstance(record, dict):
            raise ValueError(
                f"Line {number} of {text} must be a JSON object, got {line[:60]!r}. "
                "To put one object on each line: jq -c '.[]' old.json > new.jsonl"
            )
        columns = dict(_flatten(record))
        _check_columns(text, columns, place=f"Line {number} of {text}")
        source, target = (columns[name] for name in text.columns)
        yield _check_cells(text, number, source, target)


def _flatten(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Gives nested columns the dotted names that Arrow gives them."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read_parquet(text: ParallelText) -> Iterator[tuple[str, str]]:
    try:
        file = pq.ParquetFile(text.paths[0])
    except pa.ArrowInvalid as error:
        raise ValueError(f"{text} is not a Parquet file: {error}") from error
    with file:
        batches = file.iter_batches(_ROWS_AT_A_TIME)
        yield from _read_tables(text, map(pa.Table.from_batches, ([batch] for batch in batches)))


def _read_dataset(text: ParallelText) -> Iterator[tuple[str, str]]:
    tables = _open_dataset(text).with_format("arrow").iter(_ROWS_AT_A_TIME)
    return _read_tables(text, tables)


def _open_dataset(text: ParallelText) -> Dataset:
    (path,) = text.paths
    markers = (
        datasets.config.DATASET_STATE_JSON_FILENAME,
        datasets.config.DATASETDICT_JSON_FILENAME,
    )
    if any(Path(path, marker).is_file() for marker in markers):
        saved = load_from_disk(path)
        if isinstance(saved, DatasetDict):
            if text.split not in saved:
                raise ValueError(
                    f"{text} has no split {text.split!r}. Choose from: {', '.join(saved)}."
                )
            return saved[text.split]
        return saved
    try:
        with _progress_bars_only_on_terminals():
            return load_dataset(path, text.config_name, split=text.split)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{text} is no file, no folder with data, and no dataset that could be fetched from "
            f"the Hub: {error}"
        ) from error


def _read_tables(text: ParallelText, tables: Iterable[pa.Table]) -> Iterator[tuple[str, str]]:
    first_row = 1
    for table in tables:
        while any(map(pa.types.is_struct, table.schema.types)):
            table = table.flatten()
        _check_columns(text, table.column_names, place=str(text))
        cells = zip(*(table.column(name).to_pylist() for name in text.columns), strict=True)
        for row, (source, target) in enumerate(cells, start=first_row):
            yield _check_cells(text, row, source, target)
        first_row += len(table)


_READERS: dict[str, Callable[[ParallelText], Iterator[tuple[str, str]]]] = {
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
}


def _suffix(path: str) -> str:
    return Path(path.lower().removesuffix(".gz")).suffix


def _check_columns(text: ParallelText, columns: Iterable[str], place: str) -> None:
    missing = [name for name in text.columns if name not in columns]
    if missing:
        raise ValueError(
            f"{place} has no column {' and no column '.join(map(repr, missing))}. Choose "
            f"`source_column` and `target_column` from: {', '.join(columns)}."
        )


def _check_cells(text: ParallelText, row: int, source: object, target: object) -> tuple[str, str]:
    for name, cell in zip(text.columns, (source, target), strict=True):
        if not isinstance(cell, str) or _SURROGATE.search(cell):
            raise ValueError(
                f"Row {row} of {text} must hold text in column {name!r}, got {cell!r:.60}. "
                "Correct the row or take it out."
            )
    return cast(tuple[str, str], (source, target))


@contextmanager
def _progress_bars_only_on_terminals() -> Iterator[None]:
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def tokenize_pairs(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, max_length: int
) -> tuple[Dataset, int]:
    """Adds the token ids as columns `input_ids` and `labels`, and counts what did not fit.

    Args:
        dataset: Pairs as `load_pairs` gives them.
        tokenizer: Tokenizer of both sides; the last token it gives a sentence, `</s>`, survives
            truncation.
        max_length: Most tokens that a side keeps, `</s>` counted.

    Returns:
        The dataset, and the number of pairs of which at least one side was truncated.

    Raises:
        ValueError: If `max_length` leaves no room for text.
    """
    if max_length < 2:
        raise ValueError(
            f"`max_length` must be at least 2, one token of text and `</s>`, got {max_length}."
        )

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        encoded = tokenizer(
            batch["source"],
            text_target=batch["target"],
            return_attention_mask=False,
            verbose=False,
        )
        sources, targets = encoded["input_ids"], encoded["labels"]
        # Not left to the tokenizer: it truncates without a count, and remembers that it should.
        return {
            "input_ids": [_truncate(ids, max_length) for ids in sources],
            "labels": [_truncate(ids, max_length) for ids in targets],
            "is_truncated": [
                max(len(source), len(target)) > max_length
                for source, target in zip(sources, targets, strict=True)
            ],
        }

    with _progress_bars_only_on_terminals():
        tokenized = dataset.map(encode, batched=True, load_from_cache_file=False, desc="Tokenize")
    truncated_pairs = sum(tokenized["is_truncated"][:])
    return tokenized.remove_columns("is_truncated"), truncated_pairs


def _truncate(ids: list[int], max_length: int) -> list[int]:
    return ids if len(ids) <= max_length else ids[: max_length - 1] + ids[-1:]


def pair_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of source and target, `[pairs, 2]`, of a dataset from `tokenize_pairs`."""
    names = ["input_ids", "labels"]
    tables = dataset.select_columns(names).with_format("arrow").iter(_ROWS_AT_A_TIME)
    parts = [
        np.stack([pc.list_value_length(table[name]).to_numpy() for name in names], axis=1)
        for table in tables
    ]
    return np.concatenate(parts).astype(np.int64)


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of pairs of like length that hold a budget of tokens, padding counted.

    A batch of n pairs costs n * (longest source + longest target) tokens. The pairs are sorted by
    their lengths and the sorted row is cut wherever the next pair would exceed the budget. Each
    epoch shuffles the pairs that have equal lengths on both sides, hence exchanges pairs between
    batches, and shuffles the order of the batches; since the row of sorted lengths stays the same,
    so do the cuts, and every epoch has the same number of batches.

    With several processes, all of them cut the same batches and each yields its share of every
    one. An epoch depends on `seed` and on `set_epoch` alone, so a run can be resumed by skipping
    batches.

    Args:
        lengths: Tokens of source and target of each pair, `[pairs, 2]`.
        max_tokens: Most tokens that a batch costs, over all processes together.
        seed: Together with the epoch decides what is in the batches, and their order.
        num_processes: Processes that share each batch.
        process_index: Which of them this one is, counted from 0.

    Attributes:
        epoch: Epoch that the next iteration runs through, set by `set_epoch`.
        padding: Share of padding in the tokens of an epoch, 0 to 1; the same in each.

    Raises:
        ValueError: If there are no pairs, a pair exceeds the budget alone, or a process would have
            no share of a batch.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]] | npt.NDArray[np.int64],
        max_tokens: int,
        *,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        if len(lengths) < num_processes:
            raise ValueError(
                f"Each process needs a pair of its own, got {len(lengths)} pairs for "
                f"{num_processes} processes."
            )
        source, target = np.asarray(lengths, dtype=np.int64).T
        _check_budget(source + target, max_tokens)
        self.seed = seed
        self.num_processes = num_processes
        self.process_index = process_index
        self.epoch = 0
        # Along one value of the longer side, the other side grows and shrinks in turn, so that
        # neighbours are alike on both sides all along the row.
        longer_side, difference = np.maximum(source, target), source - target
        self._sort_keys = np.where(longer_side % 2, difference, -difference), longer_side

        order = np.lexsort(self._sort_keys)
        source, target = source[order], target[order]
        self._starts = _cut(source, target, max_tokens, num_processes)
        sizes = np.diff(self._starts, append=len(order))
        longest = np.maximum.reduceat(source, self._starts)
        longest += np.maximum.reduceat(target, self._starts)
        if sizes.min() < num_processes or (sizes * longest).max() > max_tokens:
            enough = 2 * num_processes * int(source.max() + target.max())
            raise ValueError(
                f"Each of {num_processes} processes needs a pair of every batch, which "
                f"`max_tokens` = {max_tokens} does not give. {enough} is always enough for these "
                "pairs; or use fewer processes."
            )
        self.padding = float(1 - (source + target).sum() / (sizes * longest).sum())

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return len(self._starts)

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = np.lexsort((rng.random(len(self._sort_keys[0])), *self._sort_keys))
        batches = np.split(order, self._starts[1:])
        for index in rng.permutation(len(batches)):
            yield batches[index][self.process_index :: self.num_processes].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration, counted from 0."""
        self.epoch = epoch


def _check_budget(tokens: npt.NDArray[np.int64], max_tokens: int) -> None:
    longest = int(tokens.argmax())
    if tokens[longest] > max_tokens:
        raise ValueError(
            f"`max_tokens` must hold the longest pair, got {max_tokens} for pair {longest} "
            f"(counted from 0) of {tokens[longest]} tokens. Raise `max_tokens`, or truncate pairs "
            "to a smaller `max_length`."
        )


def _cut(
    source: npt.NDArray[np.int64],
    target: npt.NDArray[np.int64],
    max_tokens: int,
    num_processes: int,
) -> npt.NDArray[np.int64]:
    """Where the batches start in the sorted row of lengths."""
    starts = [0]
    longest_source = longest_target = 0
    for index, (source_tokens, target_tokens) in enumerate(
        zip(source.tolist(), target.tolist(), strict=True)
    ):
        longest_source = max(longest_source, source_tokens)
        longest_target = max(longest_target, target_tokens)
        if (index + 1 - starts[-1]) * (longest_source + longest_target) > max_tokens:
            starts.append(index)
            longest_source, longest_target = source_tokens, target_tokens
    # What is left over for the last batch may be too little for a share each.
    if len(starts) > 1:
        starts[-1] = min(starts[-1], len(source) - num_processes)
    return np.array(starts)


def checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
