"""Training pairs as a `DataLoader` reads them: stored, drawn again in each epoch, or streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.bpe_dropout import SegmentedPairs
from vanilla_transformer_tools.text.filters import Corpus
from vanilla_transformer_tools.text.streaming import TokenBatchStream
from vanilla_transformer_tools.text.token_cache import cached_ids
from vanilla_transformer_tools.text.token_ids import pair_lengths
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair


@dataclass(frozen=True)
class TrainingData:
    """Token ids of the training pairs, how they are batched, and their statistics.

    Attributes:
        dataset: Dataset of a `DataLoader`.
        batching: Arguments of `DataLoader` that decide on the batches.
        set_epoch: Chooses the epoch of the next iteration, counted from 0.
        is_corpus: Whether the numbers are of an epoch, and not of a stream's first buffer.
        pairs: Number of pairs.
        truncated_pairs: Number of pairs with a truncated side.
        batches: Number of batches that each process goes through.
        tokens: Number of tokens of both sides, without padding.
        padding: Share of padding in the batches, 0 to 1.
    """

    dataset: Dataset | SegmentedPairs | TokenBatchStream
    batching: dict[str, Any]
    set_epoch: Callable[[int], None]
    is_corpus: bool
    pairs: int
    truncated_pairs: int
    batches: int
    tokens: int
    padding: float

    @property
    def period(self) -> str:
        """What the numbers are of, in words."""
        return "an epoch" if self.is_corpus else "a buffer"

    def describe_pairs(self) -> str:
        """Number of pairs and of truncated ones, in words."""
        of_buffer = "" if self.is_corpus else f" {self.period}"
        cut = f"{self.truncated_pairs:,} of them cut to the maximal length"
        return f"{self.pairs:,}{of_buffer}, {cut}"

    def describe_batches(self) -> str:
        """Number of batches and share of padding, in words."""
        return f"{self.batches:,} {self.period}, {100 * self.padding:.1f} % padding"

    def record(self, epochs: float) -> dict[str, float | None]:
        """Facts in `run.json` about a run over `epochs`; None for unknown ones."""
        counts = {
            "pairs": self.pairs,
            "truncated_pairs": self.truncated_pairs,
            "epochs": round(epochs, 2),
        }
        return {name: count if self.is_corpus else None for name, count in counts.items()}


def build_data(
    corpus: Corpus, tokenizers: TokenizerPair, settings: TrainSettings, arguments: TrainingArguments
) -> TrainingData:
    """Training data of the kind that the settings ask for.

    Token ids are computed once, and kept for other runs (see `cached_ids`); or drawn again in each
    epoch, by BPE-dropout; or computed from a stream, whose numbers are measured on this process's
    share of the first buffer.

    Args:
        corpus: The text of the run.
        tokenizers: The tokenizers of source and target.
        settings: Kind of the data, longest side, budget of a batch, size of a buffer.
        arguments: Seed and processes.
    """
    sampling: dict[str, Any] = {
        "max_tokens": settings.max_tokens_per_batch,
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        "num_processes": arguments.world_size,
        "process_index": arguments.process_index,
    }
    longest = settings.max_length
    if settings.streaming:
        buffer = settings.shuffle_buffer
        stream = TokenBatchStream(
            corpus.read, tokenizers, max_length=longest, buffer_size=buffer, **sampling
        )
        return _in_buffers(stream, arguments.world_size)
    pairs = corpus.filtered.kept
    if not settings.bpe_dropout:
        tokenized, truncated = cached_ids(pairs, tokenizers, max_length=longest)
        sampler = TokenBatchSampler(pair_lengths(tokenized), **sampling)
        return in_epochs(tokenized, sampler, truncated)
    drawn = SegmentedPairs(
        tokenizers,
        pairs["source"][:],
        pairs["target"][:],
        rate=settings.bpe_dropout,
        seed=arguments.seed,
        max_length=longest,
        languages=pairs["tag"][:] if settings.tag_column else None,
    )
    sampler = TokenBatchSampler(drawn.draw(0), redraw=drawn.draw, **sampling)
    return in_epochs(drawn, sampler, drawn.truncated_pairs)


def in_epochs(
    dataset: Dataset | SegmentedPairs, sampler: TokenBatchSampler, truncated_pairs: int
) -> TrainingData:
    """Tokenised pairs in the batches of a sampler.

    Args:
        dataset: Columns `input_ids` and `labels`.
        sampler: Sampler of these pairs.
        truncated_pairs: Number of pairs with a truncated side.
    """
    return TrainingData(
        dataset,
        {"batch_sampler": sampler},
        sampler.set_epoch,
        True,
        len(dataset),
        truncated_pairs,
        len(sampler),
        sampler.tokens,
        sampler.padding,
    )


def _in_buffers(stream: TokenBatchStream, processes: int) -> TrainingData:
    """Pairs of a stream; the shares of the other processes are taken to be like this one's."""
    return TrainingData(
        stream,
        # The stream yields whole batches.
        {"batch_size": None},
        # It numbers its buffers itself.
        lambda epoch: None,
        False,
        processes * stream.buffer_size,
        processes * stream.truncated_pairs,
        stream.batches_per_buffer,
        processes * stream.tokens,
        stream.padding,
    )
