"""Batches of a token budget from a corpus that is read while it trains and stored nowhere."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainingArguments

from vanilla_transformer.data.batches import TokenBatchSampler
from vanilla_transformer.data.parallel_text import encode_pairs
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair
from vanilla_transformer_cli.settings import TrainSettings


def check_streaming(settings: TrainSettings, arguments: TrainingArguments) -> None:
    """Refuses settings that ask more of a stream than it can give.

    Raises:
        ValueError: If there are any; tells all.
    """
    faults = []
    if arguments.max_steps < 1:
        faults.append(
            "--streaming needs --max_steps, the number of updates, got "
            f"{arguments.max_steps}: nobody knows how long an epoch of a stream is."
        )
    if settings.tokenizer_pairs < 1:
        faults.append(f"--tokenizer_pairs must be at least 1, got {settings.tokenizer_pairs}.")
    if settings.bpe_dropout:
        faults.append(
            f"--bpe_dropout draws from all words of a corpus, got {settings.bpe_dropout} with "
            "--streaming. Leave one of the two out."
        )
    if settings.filter_duplicates:
        faults.append(
            "--filter_duplicates remembers all pairs, which --streaming does not. Leave one of "
            "the two out."
        )
    if faults:
        raise ValueError("\n".join(faults))


# What the tokenizer gives holds hundreds of bytes for each token.
_PAIRS_AT_A_TIME = 1000

# Token ids of source and target.
EncodedPair = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]


class TokenBatchStream(IterableDataset[list[dict[str, list[int]]]]):
    """This process's share of each batch, pass after pass over a corpus, without end.

    A buffer of pairs is sorted, cut and shuffled as `TokenBatchSampler` does with a whole corpus.
    While its batches are used, the next buffer is filled, a few pairs after each batch; so memory
    holds two of them, and no batch waits for a whole one. A buffer goes on with the next pass
    where one ends.

    With several processes, or several workers of a `DataLoader`, each reads the whole corpus and
    cuts the same batches. What a batch holds follows from its number and `seed` alone: a run is
    resumed by skipping batches, for which their pairs are read and tokenised again.

    Args:
        read: Begins a pass and yields pairs of text, source and target, the same at each call.
        tokenizers: Of source and target.
        max_length: Most tokens that a side keeps, `</s>` counted.
        max_tokens: Most tokens that a batch costs, padding counted, over all processes together.
        buffer_size: Pairs that are in a buffer. A larger one has less padding and mixes pairs
            from places farther apart.
        seed: Together with the number of a buffer decides on its batches, and their order.
        num_processes: Processes that share each batch.
        process_index: Which of them this one is, counted from 0.

    Attributes:
        batches_per_buffer: Batches of the first buffer.
        padding: Share of padding in its tokens, 0 to 1.
        truncated_pairs: Pairs in it of which a side was cut off.

    Raises:
        ValueError: If the budget or the buffer may not give each process a share of every batch,
            or `read` does.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[tuple[str, str]]],
        tokenizers: TokenizerPair,
        *,
        max_length: int,
        max_tokens: int,
        buffer_size: int,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        # Told now, not at the first unlucky buffer. Two pairs for each process leave enough for
        # the last batch of a buffer, see `TokenBatchSampler`.
        enough = 2 * max_length * (1 if num_processes == 1 else 2 * num_processes)
        if max_tokens < enough:
            raise ValueError(
                f"`max_tokens` must be at least {enough}, for pairs of twice `max_length` = "
                f"{max_length} tokens and {num_processes} processes, got {max_tokens}. Nobody "
                "knows the longest pair of a stream: raise `max_tokens`, or truncate pairs to a "
                "smaller `max_length`."
            )
        if buffer_size < num_processes:
            raise ValueError(
                f"The buffer must hold a pair for each of {num_processes} processes, got a size "
                f"of {buffer_size}. Thousands of pairs keep padding low."
            )
        self.buffer_size = buffer_size
        self._read = read
        self._tokenizers = tokenizers
        self._max_length = max_length
        self._sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "seed": seed,
            "num_processes": num_processes,
            "process_index": process_index,
        }
        buffer, self.truncated_pairs = self._encode(self._pairs(), buffer_size)
        sampler = self._sampler(buffer)
        self.batches_per_buffer = len(sampler)
        self.padding = sampler.padding

    def __iter__(self) -> Iterator[list[dict[str, list[int]]]]:
        worker = get_worker_info()
        if worker is None:
            return self._batches()
        # The loader takes a batch of each worker in turn.
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

    def _pairs(self) -> Iterator[tuple[str, str]]:
        while True:
            yield from self._read()

    def _encode(self, pairs: Iterator[tuple[str, str]], size: int) -> tuple[list[EncodedPair], int]:
        """The next pairs, and how many of them were truncated."""
        rows: list[EncodedPair] = []
        truncated = 0
        chosen = islice(pairs, size)
        while part := list(islice(chosen, _PAIRS_AT_A_TIME)):
            sources, targets = map(list, zip(*part, strict=True))
            columns = encode_pairs(
                {"source": sources, "target": targets}, self._tokenizers, self._max_length
            )
            # Lists would hold ten times the bytes.
            rows += (
                (np.array(source, np.int32), np.array(target, np.int32))
                for source, target in zip(columns["input_ids"], columns["labels"], strict=True)
            )
            truncated += sum(columns["is_truncated"])
        return rows, truncated

    def _sampler(self, buffer: list[EncodedPair]) -> TokenBatchSampler:
        lengths = [(len(source), len(target)) for source, target in buffer]
        return TokenBatchSampler(lengths, **self._sampling)
