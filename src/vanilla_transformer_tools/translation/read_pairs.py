"""Texts and their translations, read once more for the alignment of their tokens."""

from collections.abc import Iterable, Iterator
from itertools import islice

from transformers import BatchEncoding

from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, end_length
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.segments import without_surrogates

PAIRS_PER_BATCH = 64


def encode_pair(
    tokenizers: TokenizerPair, source: str, target: str = ""
) -> tuple[BatchEncoding, BatchEncoding]:
    """Ids of a source, without a language tag, and of a target, and their places if known."""
    source, target = map(without_surrogates, (source, target))
    sides = (tokenizers.source, {"text": source}), (tokenizers.target, {"text_target": target})
    read, written = (
        one(**text, return_offsets_mapping=one.is_fast, verbose=False) for one, text in sides
    )
    return read, written


def read_pairs(
    tokenizers: TokenizerPair,
    engine: TorchEngine,
    encoded: Iterable[tuple[BatchEncoding, BatchEncoding]],
) -> Iterator[tuple[BatchEncoding, BatchEncoding, list[int]]]:
    """Pairs with the place that each target token attends to most, see `TorchEngine.force`.

    Args:
        tokenizers: Tokenizers of the pairs.
        engine: Engine that reads them.
        encoded: Pairs of `encode_pair`.

    Returns:
        Each pair with the position in its source, the prefix counted, for each target token.
    """
    rest = iter(encoded)
    while batch := list(islice(rest, PAIRS_PER_BATCH)):
        passes = engine.force(
            [[*tokenizers.source_prefix, *source["input_ids"]] for source, _ in batch],
            [target["input_ids"] for _, target in batch],
            align=True,
            end_length=end_length(tokenizers.source),
        )
        for (source, target), forced in zip(batch, passes, strict=True):
            yield source, target, forced.alignment
