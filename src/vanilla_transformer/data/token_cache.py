"""Token ids of training pairs, kept in the cache of `datasets`, so that another run need not wait.

The folder `vanilla_transformer` of that cache has an Arrow file for each corpus, named by all that
its ids depend on. Everything in it may be deleted at any time.
"""

import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from accelerate import PartialState
from datasets import Dataset

from vanilla_transformer.data.token_ids import (
    count_truncated,
    encode_pairs,
    map_to_ids,
    tokenize_pairs,
)
from vanilla_transformer.files import CACHE_VARIABLE, naming_full_disk, scratch_folder
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair

# Corpora in the cache; those that were not used for longest are deleted.
MOST_CORPORA = 8

_ROWS_AT_A_TIME = 10_000
# Pairs whose ids are part of a name, for what a tokenizer does not record of itself: languages that
# were chosen for it, or segmentations that it draws at random.
_SAMPLE = 100
_SUFFIX = ".arrow"


def cached_ids(
    pairs: Dataset, tokenizers: TokenizerPair, *, max_length: int
) -> tuple[Dataset, int]:
    """Token ids of pairs, columns `input_ids` and `labels`, from the cache if they are there.

    Text, tokenizers, `max_length` and the versions of the libraries decide on that. A file appears
    in the cache when it is whole. Where the cache cannot be written, or `datasets` was told to keep
    none, the ids are computed as by `tokenize_pairs`. The first process of a machine computes them
    for all.

    Args:
        pairs: As `load_pairs` returns them.
        tokenizers: As for `tokenize_pairs`.
        max_length: As for `tokenize_pairs`.

    Returns:
        The dataset, and the number of pairs with a truncated side.

    Raises:
        ValueError: As `tokenize_pairs`.
        OSError: If there is no room for the ids.
    """
    folder = _folder()
    if folder is None:
        tokenized, truncated = tokenize_pairs(pairs, tokenizers, max_length=max_length)
        return tokenized.select_columns(["input_ids", "labels"]), truncated
    name = _key(pairs, tokenizers, max_length) + _SUFFIX
    with PartialState().local_main_process_first():
        kept = _read(folder / name, len(pairs))
        if kept is None:
            hint = "Make room there, or set HF_DATASETS_CACHE to a folder with more."
            with (
                naming_full_disk(folder, "the token ids of the pairs", hint),
                scratch_folder(folder, ".new-") as scratch,
            ):
                map_to_ids(pairs, tokenizers, max_length, scratch / name)
                os.replace(scratch / name, folder / name)
            _delete_oldest(folder)
            kept = Dataset.from_file(str(folder / name))
    return kept.remove_columns("is_truncated"), count_truncated(kept)


def _folder() -> Path | None:
    """Where ids are kept; None if they cannot or shall not be."""
    if os.environ.get(CACHE_VARIABLE) == "" or not datasets.is_caching_enabled():
        return None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "vanilla_transformer"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _key(pairs: Dataset, tokenizers: TokenizerPair, max_length: int) -> str:
    """Digest of all that the ids depend on."""
    digest = xxhash.xxh3_128()
    sample = encode_pairs(pairs[:_SAMPLE], tokenizers, max_length)
    versions = [version(name) for name in ("vanilla-transformer", "transformers", "tokenizers")]
    digest.update(repr([tokenizers.contents, max_length, versions, sample]).encode())
    for table in pairs.with_format("arrow").iter(_ROWS_AT_A_TIME):
        for name in pairs.column_names:
            # The lengths decide where a text ends.
            digest.update(pc.binary_length(table[name]).to_numpy().tobytes())
            digest.update("".join(table[name].to_pylist()).encode())
    return digest.hexdigest()


def _read(path: Path, num_pairs: int) -> Dataset | None:
    """The ids in a file, which becomes the one last used; None if it is not there or not whole."""
    try:
        kept = Dataset.from_file(str(path))
    except (OSError, pa.ArrowException):
        return None
    # In a folder of several users, it may be somebody else's.
    with suppress(OSError):
        os.utime(path)
    return kept if len(kept) == num_pairs else None


def _delete_oldest(folder: Path) -> None:
    with suppress(OSError):
        files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MOST_CORPORA]:
            old.unlink(missing_ok=True)
