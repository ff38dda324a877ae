"""Parallel text: pairs from files or `datasets`."""

from __future__ import annotations

import atexit
import errno
import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from vanilla_transformer_tools.compression import without_suffix
from vanilla_transformer_tools.files import naming_full_disk, read_lines, scratch_folder
from vanilla_transformer_tools.settings import TrainSettings

logger = logging.getLogger(__name__)

# Names of `ParallelText.columns` after reading.
COLUMNS = ("source", "target", "tag")

# So many of a corpus are in memory.
ROWS_AT_A_TIME = 10_000

_SIGNS_OF_DAMAGE = (
    pa.ArrowException,
    DatasetsError,
    AttributeError,
    KeyError,
    RuntimeError,
    TypeError,
    UnicodeDecodeError,
)
# JSON can hold half of a surrogate pair, which is no character.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ParallelText:
    """Where the pairs of one split are found.

    Attributes:
        paths: Two plain text files, source and target, one sentence a line; or one `.tsv` file
            (source, tab, target, with `tag_column` tab, tag; no header, no quoting), `.jsonl` or
            `.json` file (one object a line), `.parquet` file, folder written by `datasets`'
            `save_to_disk`, or name of a dataset, local or on the Hub. All text files may be
            compressed (.gz, .bz2, .xz). Of a corpus in several files, all of them in order:
            plain text as source, target, source, target.
        source_column: Column of the source, by name; a dot for nested ones: `translation.de`.
        target_column: Column of the target, named in the same way.
        tag_column: Column with the target language of each pair, for one model of
            several directions; None: the pairs have one direction.
        config_name: Configuration of a dataset that has several.
        split: Split of a dataset that has several.
        streaming: Whether a dataset on the Hub is read piece by piece instead of downloaded.

    Raises:
        ValueError: If there are no paths, a plain text file has no other side, plain text is mixed
            with files that hold both sides, or `tag_column` is not possible with them.
    """

    paths: tuple[str, ...]
    source_column: str = "source"
    target_column: str = "target"
    config_name: str | None = None
    split: str = "train"
    streaming: bool = False
    tag_column: str | None = None

    def __post_init__(self) -> None:
        pairs = [path for path in self.paths if holds_both_sides(path)]
        if not self.paths or (len(self.paths) > 1 and len(pairs) not in (0, len(self.paths))):
            raise ValueError(
                "`paths` must hold plain text files, source and target in turn, or files that hold "
                f"both sides, or one dataset, got {self.paths!r}."
            )
        if not pairs and len(self.paths) > 1 and len(self.paths) % 2:
            raise ValueError(
                "Plain text files must come in pairs, source and target in turn, got "
                f"{len(self.paths)}: {self.paths!r}."
            )
        if self.tag_column is not None and not pairs and len(self.paths) > 1:
            raise ValueError(
                "Two plain text files have no column of target languages, got the `tag_column` "
                f"{self.tag_column!r} for {self}. Put them into one: paste source target tag > "
                "pairs.tsv"
            )

    @property
    def parts(self) -> list[ParallelText]:
        """The corpus file by file: each has one path that holds both sides, or two."""
        size = 1 if len(self.paths) == 1 or holds_both_sides(self.paths[0]) else 2
        starts = range(0, len(self.paths), size)
        return [replace(self, paths=self.paths[start : start + size]) for start in starts]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the source and target columns, and of the column of tags if there is one."""
        if self.tag_column is None:
            return self.source_column, self.target_column
        return self.source_column, self.target_column, self.tag_column

    def __str__(self) -> str:
        """The paths as errors name them."""
        return " and ".join(map(repr, self.paths))


def parallel_text(settings: TrainSettings, paths: list[str], split: str) -> ParallelText:
    """Where a run finds the pairs of one split."""
    return ParallelText(
        tuple(paths),
        settings.source_column,
        settings.target_column,
        settings.dataset_config,
        split,
        settings.streaming,
        settings.tag_column,
    )


def load_pairs(text: ParallelText, first: int | None = None) -> Dataset:
    """All pairs as text: columns `source` and `target`, in the order of the file, nothing altered.

    With a `tag_column`, its text is the column `tag`. `first` limits the number of pairs.

    The pairs are copied to a temporary Arrow file, which is memory-mapped. It is deleted when the
    process ends or, if that was killed, when the next process loads pairs. So a corpus may be
    larger than the memory, changed files are always read again, and what `Dataset.map` writes next
    to its input is deleted with it.

    Raises:
        FileNotFoundError: If a file or dataset does not exist.
        ValueError: If the files have different numbers of lines, the kind of file is unknown, a
            column is missing, a cell holds no text, or there are no pairs.
        OSError: If there is no room for the copy.
    """
    files = [path for path in text.paths if os.path.isfile(path)]
    size = sum(map(os.path.getsize, files)) / 2**20
    takes = f" of {size:,.1f} MiB" if files and first is None else ""
    with temporary_room(f"a copy of {text}{takes}"):
        return _stored(islice(read_pairs(text), first), COLUMNS[: len(text.columns)])


def read_pairs(text: ParallelText) -> Iterator[tuple[str, ...]]:
    """Yields the pairs of `load_pairs` one by one and stores none.

    Raises:
        FileNotFoundError: As `load_pairs`, with the first pair.
        ValueError: As `load_pairs`, when the fault is reached.
    """
    for part in text.parts:
        pairs = _read_two_files(part) if len(part.paths) == 2 else _read_one_path(part)
        first = next(pairs, None)
        if first is None:
            raise ValueError(f"{part} is empty: expected at least one pair.")
        if any(cell.endswith("\r") for cell in first):
            warn_of_carriage_returns(str(part))
        yield first
        yield from pairs


def read_texts(text: ParallelText) -> Iterator[str]:
    """Both sides of each pair, one after the other; of a single plain text file, its lines."""
    (path,) = text.paths
    if not holds_both_sides(path):
        yield from read_lines(path)
        return
    for source, target, *_ in read_pairs(text):
        yield from (source, target)


@functools.cache
def warn_of_carriage_returns(name: str) -> None:
    """Warns once of text with the line ends of Windows."""
    logger.warning(
        "%s: lines end with a carriage return, which counts as a part of the text. Convert the "
        "file first: sed -i 's/\\r$//' FILE",
        name,
    )


def _stored(pairs: Iterator[tuple[str, ...]], names: Sequence[str]) -> Dataset:
    """Writes rows to a temporary Arrow file, and maps it to memory."""
    handle, path = tempfile.mkstemp(suffix=".arrow", dir=_temporary_folder())
    os.close(handle)
    schema = pa.schema([(name, pa.string()) for name in names])
    try:
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            while rows := list(islice(pairs, ROWS_AT_A_TIME)):
                writer.write_batch(pa.record_batch(list(zip(*rows, strict=True)), schema=schema))
        return Dataset.from_file(path)
    except BaseException:
        os.unlink(path)
        raise


@functools.cache
def _temporary_folder() -> Path:
    context = scratch_folder(Path(tempfile.gettempdir()), "vanilla_transformer-corpus-")
    atexit.register(context.__exit__, None, None, None)
    return context.__enter__()


def temporary_room(purpose: str) -> AbstractContextManager[None]:
    """Names the folder of temporary copies where there is no room for something."""
    hint = "Make room there, or set TMPDIR to a folder with more."
    return naming_full_disk(_temporary_folder(), purpose, hint)


def _read_two_files(text: ParallelText) -> Iterator[tuple[str, str]]:
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


def _read_one_path(text: ParallelText) -> Iterator[tuple[str, ...]]:
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
        raise FileNotFoundError(errno.ENOENT, "There is no file", path)
    return _read_tables(text, _open_dataset(text).with_format("arrow").iter(ROWS_AT_A_TIME))


def _read_tsv(text: ParallelText) -> Iterator[tuple[str, ...]]:
    count = len(text.columns)
    form = ", tab, ".join(COLUMNS[:count])
    for number, line in enumerate(read_lines(text.paths[0]), start=1):
        cells = line.split("\t")
        if len(cells) != count:
            message = f"Line {number} of {text} must be {form}, got {len(cells) - 1} tabs."
            if len(cells) > count and text.tag_column:
                # Cut off, a text with a tab would leave a part of it as the tag.
                message += " Is a tab inside of a text? Replace it with a blank."
            elif len(cells) > count:
                message += f" To keep the first {count}: cut -f 1-{count} old.tsv > new.tsv"
            raise ValueError(message)
        yield tuple(cells)


def _read_json_lines(text: ParallelText) -> Iterator[tuple[str, ...]]:
    for number, line in enumerate(read_lines(text.paths[0]), start=1):
        cause: ValueError | None = None
        try:
            record = json.loads(line)
        except ValueError as error:
            record, cause = None, error
        if not isinstance(record, dict):
            why = f": {cause}" if cause else ""
            parts = ".[]" if line.lstrip().startswith("[") else "."
            cure = f" To put one object on each line: jq -c '{parts}' old.json > new.jsonl"
            raise ValueError(
                f"Line {number} of {text} must be a JSON object, got {line[:60]!r}{why}."
                f"{cure if number == 1 or not cause else ''}"
            ) from cause
        columns = dict(_flatten(record))
        _check_columns(text, columns, place=f"Line {number} of {text}")
        yield _check_cells(text, number, tuple(columns[name] for name in text.columns))


def _flatten(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested columns by the dotted names that Arrow uses."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read_parquet(text: ParallelText) -> Iterator[tuple[str, ...]]:
    with _damage_is_named(text):
        file = pq.ParquetFile(text.paths[0])
    with file:
        batches = file.iter_batches(ROWS_AT_A_TIME)
        yield from _read_tables(text, map(pa.Table.from_batches, ([batch] for batch in batches)))


@contextmanager
def _damage_is_named(text: ParallelText) -> Iterator[None]:
    """Names the file or dataset in errors of Arrow and `datasets`, which often name none."""
    try:
        yield
    # Damaged metadata may be JSON of another form, and damaged text may not be UTF-8.
    except (OSError, *_SIGNS_OF_DAMAGE) as error:
        says_it_itself = isinstance(error, FileNotFoundError | ConnectionError)
        # Errors of the system, such as a full disk, have a number.
        if says_it_itself or (isinstance(error, OSError) and error.errno is not None):
            raise
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()).rstrip(".")
        raise ValueError(
            f"{text} is damaged, or no data that can be read: {type(cause).__name__}: "
            f"{reason:.300}. Copy or make it again."
        ) from error


def _open_dataset(text: ParallelText) -> Dataset | IterableDataset:
    (path,) = text.paths
    markers = (
        datasets.config.DATASET_STATE_JSON_FILENAME,
        datasets.config.DATASETDICT_JSON_FILENAME,
    )
    if any(Path(path, marker).is_file() for marker in markers):
        with _damage_is_named(text):
            saved = load_from_disk(path)
        if not isinstance(saved, DatasetDict):
            return saved
        if text.split not in saved:
            raise ValueError(
                f"{text} has no split {text.split!r}. Choose from: {', '.join(saved)}."
            )
        return saved[text.split]
    try:
        hint = "Make room there, or set HF_HOME to a folder with more."
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        room = naming_full_disk(cache, f"the data of {text}", hint)
        with progress_bars_only_on_terminals(), _damage_is_named(text), room:
            return load_dataset(path, text.config_name, split=text.split, streaming=text.streaming)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"{text} is no file, no folder with data, and no dataset that could be fetched from "
            f"the Hub: {error}"
        ) from error


def _read_tables(text: ParallelText, tables: Iterable[pa.Table]) -> Iterator[tuple[str, ...]]:
    first_row = 1
    remaining = iter(tables)
    while True:
        with _damage_is_named(text):
            table = next(remaining, None)
        if table is None:
            return
        while any(map(pa.types.is_struct, table.schema.types)):
            table = table.flatten()
        _check_columns(text, table.column_names, place=str(text))
        with _damage_is_named(text):
            columns = [table.column(name).to_pylist() for name in text.columns]
        for row, cells in enumerate(zip(*columns, strict=True), start=first_row):
            yield _check_cells(text, row, cells)
        first_row += len(table)


_READERS: dict[str, Callable[[ParallelText], Iterator[tuple[str, ...]]]] = {
    ".tsv": _read_tsv,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
}


def holds_both_sides(path: str) -> bool:
    """Whether the kind of a file, such as `.tsv`, holds pairs; plain text does not."""
    return _suffix(path) in _READERS


def _suffix(path: str) -> str:
    return Path(without_suffix(path.lower())).suffix


def _check_columns(text: ParallelText, columns: Iterable[str], place: str) -> None:
    missing = [name for name in text.columns if name not in columns]
    if missing:
        options = [f"`{name}_column`" for name in COLUMNS[: len(text.columns)]]
        raise ValueError(
            f"{place} has no column {' and no column '.join(map(repr, missing))}. Choose "
            f"{' and '.join(options)} from: {', '.join(columns):.300}."
        )


def _check_cells(text: ParallelText, row: int, cells: tuple[Any, ...]) -> tuple[str, ...]:
    for name, cell in zip(text.columns, cells, strict=True):
        if not isinstance(cell, str) or _SURROGATE.search(cell):
            raise ValueError(
                f"Row {row} of {text} must hold text in column {name!r}, got {cell!r:.60}. "
                "Correct the row or take it out."
            )
    return cells


@contextmanager
def progress_bars_only_on_terminals() -> Iterator[None]:
    """Keeps the bars of `datasets` out of files and pipes."""
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
