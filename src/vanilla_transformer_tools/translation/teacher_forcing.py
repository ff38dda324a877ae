"""Texts and given translations, read by a model: alignments and probabilities of tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from transformers import BatchEncoding

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.text.languages import end_length
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation.engine import ForcedPass
from vanilla_transformer_tools.translation.segments import without_surrogates
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation.translator import Translator

PAIRS_PER_BATCH = 64


@dataclass(frozen=True)
class PairScore:
    """How likely a target is, given its source.

    Attributes:
        tokens: Tokens of the target, `</s>` included.
        token_scores: Natural logarithm of the probability of each, given those before it.
    """

    tokens: tuple[str, ...]
    token_scores: tuple[float, ...]

    @property
    def score(self) -> float:
        """Log-probability of the whole target."""
        return sum(self.token_scores)


def score_pairs(
    translator: "Translator", sources: Sequence[str], targets: Sequence[str]
) -> Iterator[PairScore]:
    """The log-probability of each target given its source, by teacher forcing.

    Args:
        translator: With the torch engine, set up for one direction.
        sources: Lines; they are not cut.
        targets: A line for each source.

    Raises:
        ValueError: If the engine cannot read pairs, the numbers of lines differ, or a line is
            longer than the positions of the model.
    """
    engine, tokenizers = translator.engine, translator.tokenizers
    if not isinstance(engine, TorchEngine):
        raise ValueError(
            "Pairs are scored by the engine 'torch', which can read a given translation, got "
            f"{type(engine).__name__}."
        )
    # As the model was trained.
    lines = zip(map(without_blank_ends, sources), map(without_blank_ends, targets), strict=True)
    for _, target, forced in forced_passes(tokenizers, engine, lines):
        tokens = tokenizers.target.convert_ids_to_tokens(target["input_ids"])
        yield PairScore(tuple(tokens), tuple(forced.log_probs))


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


def forced_passes(
    tokenizers: TokenizerPair,
    engine: TorchEngine,
    pairs: Iterable[tuple[str, str]],
    *,
    align: bool = False,
) -> Iterator[tuple[BatchEncoding, BatchEncoding, ForcedPass]]:
    """Ids of sources and targets, as `encode_pair` gives them, with what `TorchEngine.force` finds.

    Positions of an alignment count the prefix of the source.
    """
    encoded = (encode_pair(tokenizers, *pair) for pair in pairs)
    while batch := list(islice(encoded, PAIRS_PER_BATCH)):
        passes = engine.force(
            [[*tokenizers.source_prefix, *source["input_ids"]] for source, _ in batch],
            [target["input_ids"] for _, target in batch],
            align=align,
            end_length=end_length(tokenizers.source),
        )
        for (source, target), forced in zip(batch, passes, strict=True):
            yield source, target, forced
