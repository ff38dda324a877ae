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
from collections.abc import Callable, Iterable, Iterator
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
            "input_ids": [truncate(ids, max_length) for ids in sources],
            "labels": [truncate(ids, max_length) for ids in targets],
            "is_truncated": [
                max(len(source), len(target)) > max_length
                for source, target in zip(sources, targets, strict=True)
            ],
        }

    with _progress_bars_only_on_terminals():
        tokenized = dataset.map(encode, batched=True, load_from_cache_file=False, desc="Tokenize")
    truncated_pairs = sum(tokenized["is_truncated"][:])
    return tokenized.remove_columns("is_truncated"), truncated_pairs


def truncate(ids: list[int], max_length: int) -> list[int]:
    """Keeps `max_length` tokens at most, the last one, `</s>`, among them."""
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


def checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
