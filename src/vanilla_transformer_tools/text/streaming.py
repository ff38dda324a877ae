"""Batches of a token budget from a corpus that is read during training and not stored."""

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info

from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import COLUMNS
from vanilla_transformer_tools.text.token_ids import PairEncoder
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# The tokenizer's output takes hundreds of bytes per token.
_PAIRS_AT_A_TIME = 1000

# Token ids of source and target.
EncodedPair = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]


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

    Args:
        read: Begins a pass and yields pairs of text, the same at each call: source, target and,
            for several directions, the language of the target.
        tokenizers: Of source and target.
        max_length: Most tokens that a side keeps, `</s>` counted.
        max_tokens: Most tokens that a batch costs, padding counted, over all processes together.
        buffer_size: Number of pairs in the buffers of all processes together. A larger one has less
            padding and mixes pairs from more distant places.
        seed: Determines, together with the number of a buffer, its batches and their order.
        num_processes: Number of processes that share the corpus.
        process_index: Index of this process, counted from 0.

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
        self._encoder = PairEncoder(tokenizers, max_length)
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
        return islice(passes, self._process_index, None, self._num_processes)

    def _encode(self, pairs: Iterator[tuple[str, ...]], size: int) -> tuple[list[EncodedPair], int]:
        """The next pairs, and the number of truncated ones."""
        rows: list[EncodedPair] = []
        truncated = 0
        chosen = islice(pairs, size)
        while part := list(islice(chosen, _PAIRS_AT_A_TIME)):
            # Without tags, the last name remains unused.
            texts = dict(zip(COLUMNS, map(list, zip(*part, strict=True)), strict=False))
            columns = self._encoder(texts)
            sides = (columns[name] for name in ("input_ids", "labels"))
            # The ids of each line, in the memory of the column.
            lines = (np.split(one.values.to_numpy(), one.offsets.to_numpy()[1:-1]) for one in sides)
            rows += zip(*lines, strict=True)
            truncated += columns["is_truncated"].true_count
        return rows, truncated

    def _sampler(self, buffer: list[EncodedPair]) -> TokenBatchSampler:
        lengths = [(len(source), len(target)) for source, target in buffer]
        return TokenBatchSampler(lengths, **self._sampling)
