"""Vocabularies and token ids of training pairs, kept so that another run need not wait for them.

The folder `vanilla_transformer` in the cache of `datasets` has a file for each vocabulary and an
Arrow file for the ids of each corpus, named by all that they depend on. Everything in it may be
deleted at any time.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer

from vanilla_transformer.tokenization_vanilla_transformer import (
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
from vanilla_transformer_tools.text.parallel_text import ROWS_AT_A_TIME
from vanilla_transformer_tools.text.token_ids import (
    count_truncated,
    encode_pairs,
    store_ids,
    tokenize_pairs,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

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
