"""Training pairs as a `DataLoader` reads them: stored, drawn again in each epoch, or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from torch.utils import data as torch_data
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainingArguments

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.bpe_dropout import SegmentedPairs
from vanilla_transformer_tools.text.casing import Casing
from vanilla_transformer_tools.text.filters import Corpus
from vanilla_transformer_tools.text.parallel_text import COLUMNS, ROWS_AT_A_TIME
from vanilla_transformer_tools.text.token_ids import (
    EncodedPair,
    cached_ids,
    encoded_rows,
    pair_lengths,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# The tokenizer's output takes hundreds of bytes per token.
_PAIRS_AT_A_TIME = 1000


class TokenBatchStream(IterableDataset[list[dict[str, list[int]]]]):
    """Endless stream of the batches of this process, over repeated passes over a corpus.

    A buffer of pairs is sorted, cut and shuffled as `TokenBatchSampler` does with a whole corpus.
    While its batches are used, the next buffer is filled, a few pairs after each batch. So two
    buffers are in memory, and no batch waits for a whole one. A buffer may go into the next pass.

    Each of n processes reads all pairs but tokenises only every n-th one, which is what takes long.
    From these it cuts its own batches, with an n-th of the budget. In a pass, each pair goes to
    exactly one process. All workers of a `DataLoader` cut the same batches. The content of a batch
    depends only on its number, `seed`, `num_processes` and `process_index`. A run is resumed by
    skipping batches, whose pairs are read and tokenised again.

    Arguments that are not listed are those of `TokenBatchSampler` and `tokenize_pairs`.

    Args:
        read: Begins a pass and yields pairs of text, the same at each call: source, target and,
            for several directions, the language of the target.
        buffer_size: Number of pairs in the buffers of all processes together. A larger one has less
            padding and mixes pairs from more distant places.
        casing: Pairs that are changed, see `Casing`; None: none is.

    Attributes:
        buffer_size: Number of pairs in a buffer of this process.
        batches_per_buffer: Number of batches in its first buffer.
        tokens: Tokens of that buffer without padding.
        padding: Share of padding in its batches, 0 to 1.
        truncated_pairs: Number of its pairs with a truncated side.

    Raises:
        ValueError: If a process's part of the budget may be too small for a pair, or its part of
            the buffer is empty; and whatever `read` raises.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[tuple[str, ...]]],
        tokenizers: TokenizerPair,
        *,
        max_length: int,
        max_tokens: int,
        buffer_size: int,
        seed: int,
        casing: Casing | None = None,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        # Checked now, because otherwise some later buffer might fail.
        enough = 2 * max_length * num_processes
        if max_tokens < enough:
            raise ValueError(
                f"`max_tokens` must be at least {enough}, for pairs of twice `max_length` = "
                f"{max_length} tokens and {num_processes} processes, got {max_tokens}. The longest "
                "pair of a stream is unknown: raise `max_tokens`, or truncate pairs to a smaller "
                "`max_length`."
            )
        if buffer_size < num_processes:
            raise ValueError(
                f"The buffer must hold a pair for each of {num_processes} processes, got a size "
                f"of {buffer_size}. Thousands of pairs keep padding low."
            )
        self.buffer_size = buffer_size // num_processes
        self._read = read
        self._tokenizers, self._max_length, self._casing = tokenizers, max_length, casing
        self._num_processes, self._process_index = num_processes, process_index
        self._sampling: dict[str, Any] = {"max_tokens": max_tokens // num_processes, "seed": seed}
        buffer, self.truncated_pairs = self._encode(self._pairs(), self.buffer_size)
        sampler = self._sampler(buffer)
        self.batches_per_buffer = len(sampler)
        self.tokens = sampler.tokens
        self.padding = sampler.padding

    def __iter__(self) -> Iterator[list[dict[str, list[int]]]]:
        worker = get_worker_info()
        if worker is None:
            return self._batches()
        # The loader takes one batch from each worker in turn.
        return islice(self._batches(), worker.id, None, worker.num_workers)

    def _batches(self) -> Iterator[list[dict[str, list[int]]]]:
        pairs = self._pairs()
        buffer, _ = self._encode(pairs, self.buffer_size)
        for number in count():
            sampler = self._sampler(buffer)
            sampler.set_epoch(number)
            shares = np.linspace(0, self.buffer_size, len(sampler) + 1, dtype=int)
            following: list[EncodedPair] = []
            for batch, size in zip(sampler, np.diff(shares).tolist(), strict=True):
                chosen = (buffer[row] for row in batch)
                yield [{"input_ids": s.tolist(), "labels": t.tolist()} for s, t in chosen]
                following += self._encode(pairs, size)[0]
            buffer = following

    def _pairs(self) -> Iterator[tuple[str, ...]]:
        """This process's share of endless passes."""
        passes = chain.from_iterable(self._read() for _ in count())
        share = islice(passes, self._process_index, None, self._num_processes)
        if not self._casing:
            return share
        places = count(self._process_index, self._num_processes)
        return map(self._casing.changed_pair, share, places)

    def _encode(self, pairs: Iterator[tuple[str, ...]], size: int) -> tuple[list[EncodedPair], int]:
        """The next pairs, and the number of truncated ones."""
        rows: list[EncodedPair] = []
        truncated = 0
        chosen = islice(pairs, size)
        while part := list(islice(chosen, _PAIRS_AT_A_TIME)):
            encoded, too_long = encoded_rows(part, self._tokenizers, self._max_length)
            rows += encoded
            truncated += too_long
        return rows, truncated

    def _sampler(self, buffer: list[EncodedPair]) -> TokenBatchSampler:
        lengths = [(len(source), len(target)) for source, target in buffer]
        return TokenBatchSampler(lengths, **self._sampling)


class CasedPairs(torch_data.Dataset[dict[str, list[int]]]):
    """Token ids of pairs of which each epoch changes some; replaces the dataset of `cached_ids`.

    `ids` are those of the pairs as they are, `pairs` their text.
    """

    def __init__(
        self,
        ids: Dataset,
        pairs: Dataset,
        tokenizers: TokenizerPair,
        casing: Casing,
        max_length: int,
    ) -> None:
        self._ids, self._pairs, self._casing = ids, pairs, casing
        self._encoding = tokenizers, max_length
        self._plain_lengths = pair_lengths(ids)
        self._changed: dict[int, EncodedPair] = {}

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        """Changes the pairs of an epoch; returns the tokens of each pair's sides, `[pairs, 2]`."""
        self._changed = {}
        rows = self._casing.rows(len(self), epoch)
        for first in range(0, len(rows), ROWS_AT_A_TIME):
            part = rows[first : first + ROWS_AT_A_TIME]
            texts = self._pairs[part]
            pairs = zip(*(texts[name] for name in COLUMNS if name in texts), strict=True)
            places = (row + epoch for row in part)
            changed = list(map(self._casing.changed_pair, pairs, places))
            self._changed |= zip(part, encoded_rows(changed, *self._encoding)[0], strict=True)
        lengths = self._plain_lengths.copy()
        for row, sides in self._changed.items():
            lengths[row] = [len(side) for side in sides]
        return lengths

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._ids)

    def __getitem__(self, pair: int) -> dict[str, list[int]]:
        """`input_ids` and `labels` of a pair, as last drawn."""
        if pair not in self._changed:
            found: dict[str, list[int]] = self._ids[pair]
            return found
        source, target = self._changed[pair]
        return {"input_ids": source.tolist(), "labels": target.tolist()}


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

    dataset: Dataset | SegmentedPairs | CasedPairs | TokenBatchStream
    batching: dict[str, Any]
    set_epoch: Callable[[int], None]
    is_corpus: bool
    pairs: int
    truncated_pairs: int
    batches: int
    tokens: int
    padding: float

    def describe_pairs(self) -> str:
        """Number of pairs and of truncated ones, in words."""
        of_buffer = "" if self.is_corpus else " a buffer"
        cut = f"{self.truncated_pairs:,} of them cut to the maximal length"
        return f"{self.pairs:,}{of_buffer}, {cut}"

    def describe_batches(self) -> str:
        """Number of batches and share of padding, in words."""
        period = "an epoch" if self.is_corpus else "a buffer"
        return f"{self.batches:,} {period}, {100 * self.padding:.1f} % padding"

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
    """
    sampling: dict[str, Any] = {
        "max_tokens": settings.max_tokens_per_batch,
        "seed": arguments.seed if arguments.data_seed is None else arguments.data_seed,
        "num_processes": arguments.world_size,
        "process_index": arguments.process_index,
    }
    added = tokenizers.source.added_tokens_decoder.values()
    casing = Casing.of_run(settings, [str(token) for token in added if not token.special])
    longest = settings.max_length
    if settings.streaming:
        sizes = {"max_length": longest, "buffer_size": settings.shuffle_buffer}
        stream = TokenBatchStream(corpus.read, tokenizers, casing=casing, **sizes, **sampling)
        return _in_buffers(stream, arguments.world_size)
    pairs = corpus.filtered.kept
    if settings.bpe_dropout:
        rate, seed = settings.bpe_dropout, arguments.seed
        drawn = SegmentedPairs(tokenizers, pairs[:], rate=rate, seed=seed, max_length=longest)
        sampler = TokenBatchSampler(drawn.draw(0), redraw=drawn.draw, **sampling)
        return in_epochs(drawn, sampler, drawn.truncated_pairs)
    tokenized, truncated = cached_ids(pairs, tokenizers, max_length=longest)
    if casing:
        cased = CasedPairs(tokenized, pairs, tokenizers, casing, longest)
        sampler = TokenBatchSampler(cased.draw(0), redraw=cased.draw, **sampling)
        return in_epochs(cased, sampler, truncated)
    return in_epochs(tokenized, TokenBatchSampler(pair_lengths(tokenized), **sampling), truncated)


def in_epochs(
    dataset: Dataset | SegmentedPairs | CasedPairs, sampler: TokenBatchSampler, truncated_pairs: int
) -> TrainingData:
    """Token ids of pairs in the batches of a sampler."""
    return TrainingData(
        dataset=dataset,
        batching={"batch_sampler": sampler},
        set_epoch=sampler.set_epoch,
        is_corpus=True,
        pairs=len(dataset),
        truncated_pairs=truncated_pairs,
        batches=len(sampler),
        tokens=sampler.tokens,
        padding=sampler.padding,
    )


def _in_buffers(stream: TokenBatchStream, processes: int) -> TrainingData:
    """Pairs of a stream; the shares of the other processes are taken to be like this one's."""
    return TrainingData(
        dataset=stream,
        # The stream yields whole batches, and numbers its buffers itself.
        batching={"batch_size": None},
        set_epoch=lambda epoch: None,
        is_corpus=False,
        pairs=processes * stream.buffer_size,
        truncated_pairs=processes * stream.truncated_pairs,
        batches=stream.batches_per_buffer,
        tokens=processes * stream.tokens,
        padding=stream.padding,
    )
