"""Training pairs as a `DataLoader` reads them: stored, drawn again in each epoch, or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.bpe_dropout import SegmentedPairs
from vanilla_transformer_tools.text.streaming import TokenBatchStream
from vanilla_transformer_tools.text.token_cache import cached_ids
from vanilla_transformer_tools.text.token_ids import pair_lengths
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair


@dataclass(frozen=True)
class Period:
    """The unit of the numbers of `TrainingData`.

    Attributes:
        one: A period with its article.
        several: The plural.
        is_corpus: Whether a period holds all pairs.
    """

    one: str
    several: str
    is_corpus: bool


EPOCH = Period("an epoch", "epochs", is_corpus=True)
BUFFER = Period("a buffer", "buffers", is_corpus=False)


@dataclass(frozen=True)
class TrainingData:
    """Token ids of the training pairs, how they are batched, and their statistics.

    Attributes:
        dataset: Dataset of a `DataLoader`.
        batching: Arguments of `DataLoader` that decide on the batches.
        set_epoch: Chooses the epoch of the next iteration, counted from 0.
        period: Unit of the following numbers: an epoch, or the first buffer of a stream.
        pairs: Number of pairs.
        truncated_pairs: Number of pairs with a truncated side.
        batches: Number of batches that each process goes through.
        tokens: Number of tokens of both sides, without padding.
        padding: Share of padding in the batches, 0 to 1.
    """

    dataset: Dataset | SegmentedPairs | TokenBatchStream
    batching: dict[str, Any]
    set_epoch: Callable[[int], None]
    period: Period
    pairs: int
    truncated_pairs: int
    batches: int
    tokens: int
    padding: float

    def describe_pairs(self) -> str:
        """Number of pairs and of truncated ones, in words."""
        pairs = f"{self.pairs:,}" if self.period.is_corpus else f"{self.pairs:,} {self.period.one}"
        return f"{pairs}, {self.truncated_pairs:,} of them cut to the maximal length"

    def describe_batches(self) -> str:
        """Number of batches and share of padding, in words."""
        return f"{self.batches:,} {self.period.one}, {100 * self.padding:.1f} % padding"

    def record(self, epochs: float) -> dict[str, float | None]:
        """Facts in `run.json` about a run over `epochs`; None for unknown ones."""
        counts = {
            "pairs": self.pairs,
            "truncated_pairs": self.truncated_pairs,
            "epochs": round(epochs, 2),
        }
        return {name: count if self.period.is_corpus else None for name, count in counts.items()}


def stored(
    pairs: Dataset,
    tokenizers: TokenizerPair,
    settings: TrainSettings,
    arguments: TrainingArguments,
) -> TrainingData:
    """Pairs whose token ids are computed once, and kept for other runs, see `cached_ids`.

    Args:
        pairs: As `load_pairs` returns them.
        tokenizers: Of source and target.
        settings: Longest side and budget of a batch.
        arguments: Seed and processes.
    """
    tokenized, truncated = cached_ids(pairs, tokenizers, max_length=settings.max_length)
    sampler = TokenBatchSampler(pair_lengths(tokenized), **_sampling(settings, arguments))
    return in_epochs(tokenized, sampler, truncated)


def drawn_each_epoch(
    pairs: Dataset,
    tokenizers: TokenizerPair,
    settings: TrainSettings,
    arguments: TrainingArguments,
) -> TrainingData:
    """Pairs with other token ids in each epoch, by BPE-dropout; arguments as for `stored`."""
    drawn = SegmentedPairs(
        tokenizers,
        pairs["source"][:],
        pairs["target"][:],
        rate=settings.bpe_dropout,
        seed=arguments.seed,
        max_length=settings.max_length,
        languages=pairs["tag"][:] if settings.tag_column else None,
    )
    sampling = _sampling(settings, arguments)
    sampler = TokenBatchSampler(drawn.draw(0), redraw=drawn.draw, **sampling)
    return in_epochs(drawn, sampler, drawn.truncated_pairs)


def in_epochs(
    dataset: Dataset | SegmentedPairs, sampler: TokenBatchSampler, truncated_pairs: int
) -> TrainingData:
    """Tokenised pairs in the batches of a sampler.

    Args:
        dataset: Columns `input_ids` and `labels`.
        sampler: Of these pairs.
        truncated_pairs: Number of pairs with a truncated side.
    """
    return TrainingData(
        dataset,
        {"batch_sampler": sampler},
        sampler.set_epoch,
        EPOCH,
        len(dataset),
        truncated_pairs,
        len(sampler),
        sampler.tokens,
        sampler.padding,
    )


def streamed(
    read: Callable[[], Iterator[tuple[str, ...]]],
    tokenizers: TokenizerPair,
    settings: TrainSettings,
    arguments: TrainingArguments,
) -> TrainingData:
    """Pairs that are read and tokenised during training, in the batches of a `TokenBatchStream`.

    The numbers are measured on this process's share of the first buffer. The other shares are taken
    to be like it.

    Args:
        read: Begins a pass and yields pairs of text, with tags if there are any, the same at each
            call.
        tokenizers: Of source and target.
        settings: Longest side, budget of a batch, size of a buffer.
        arguments: Seed and processes.
    """
    stream = TokenBatchStream(
        read,
        tokenizers,
        max_length=settings.max_length,
        buffer_size=settings.shuffle_buffer,
        **_sampling(settings, arguments),
    )
    return TrainingData(
        stream,
        # The stream yields whole batches.
        {"batch_size": None},
        _ignore_epoch,
        BUFFER,
        arguments.world_size * stream.buffer_size,
        arguments.world_size * stream.truncated_pairs,
        stream.batches_per_buffer,
        arguments.world_size * stream.tokens,
        stream.padding,
    )


def _ignore_epoch(epoch: int) -> None:
    """A stream numbers its buffers itself."""


def _sampling(settings: TrainSettings, arguments: TrainingArguments) -> dict[str, Any]:
    """Arguments of both sampler and stream: the budget of a batch, and this process's share."""
    return {
        "max_tokens": settings.max_tokens_per_batch,
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        "num_processes": arguments.world_size,
        "process_index": arguments.process_index,
    }
