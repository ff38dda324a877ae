"""Texts and their translations, read once more for the alignment of their tokens."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from transformers import BatchEncoding, PreTrainedTokenizerBase

from vanilla_transformer_tools.text.languages import end_length
from vanilla_transformer_tools.translation.engines import Engine, TorchEngine
from vanilla_transformer_tools.translation.segments import without_surrogates

PAIRS_PER_BATCH = 64


class Reader(Protocol):
    """What `Translator` has for reading pairs."""

    engine: Engine
    source_prefix: list[int]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the source."""

    @property
    def target_tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the target."""


def encode_source(reader: Reader, text: str) -> BatchEncoding:
    """Ids of a source, without a language tag, and their places in the text if it is known."""
    tokenizer = reader.tokenizer
    text = without_surrogates(text)
    return tokenizer(text, return_offsets_mapping=tokenizer.is_fast, verbose=False)


def encode_target(reader: Reader, text: str) -> BatchEncoding:
    """Ids of a target, and their places in the text if it is known."""
    tokenizer = reader.target_tokenizer
    text = without_surrogates(text)
    return tokenizer(text_target=text, return_offsets_mapping=tokenizer.is_fast, verbose=False)


def read_pairs(
    reader: Reader, engine: TorchEngine, encoded: Iterable[tuple[BatchEncoding, BatchEncoding]]
) -> Iterator[tuple[BatchEncoding, BatchEncoding, list[int]]]:
    """Pairs with the place that each target token attends to most, see `TorchEngine.force`.

    Args:
        reader: Translator of the pairs.
        engine: Its engine.
        encoded: Pairs of `encode_source` and `encode_target`.

    Returns:
        Each pair with the position in its source, the prefix counted, for each target token.
    """
    rest = iter(encoded)
    while batch := list(islice(rest, PAIRS_PER_BATCH)):
        passes = engine.force(
            [reader.source_prefix + source["input_ids"] for source, _ in batch],
            [target["input_ids"] for _, target in batch],
            align=True,
            end_length=end_length(reader.tokenizer),
        )
        for (source, target), forced in zip(batch, passes, strict=True):
            yield source, target, forced.alignment
