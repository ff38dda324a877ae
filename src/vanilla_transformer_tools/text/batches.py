"""Batches that hold a budget of tokens, in one process or several."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

# Tokens of source and target of each pair, `[pairs, 2]`.
Lengths = Sequence[tuple[int, int]] | npt.NDArray[np.int64]

# Share of batches in reserve if lengths are drawn anew; the sum of lengths varies much less.
_SPARE_BATCHES = 0.02


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of pairs of similar length that hold a budget of tokens, padding counted.

    A batch of n pairs costs n * (longest source + longest target) tokens. The pairs are sorted by
    length, and the sorted list is cut wherever the next pair would exceed the budget. Each epoch
    shuffles the pairs whose lengths are equal on both sides, which exchanges pairs between batches,
    and then the batches. The sorted lengths, the cuts and the number of batches do not change.

    With several processes, all of them cut the same batches, and each yields its share of every
    batch. An epoch depends only on `seed` and `set_epoch`; a run is resumed by skipping batches.

    Lengths may differ from epoch to epoch, as under BPE-dropout. Then a few more batches are
    planned than the first epoch needs. If an epoch needs fewer, its largest batches are halved; if
    it needs still more, its budget grows, percent by percent, until they are enough.

    Args:
        lengths: Tokens of source and target of each pair in the first epoch, `[pairs, 2]`.
        max_tokens: Most tokens that a batch costs, over all processes together.
        seed: Determines, together with the epoch, the batches and their order.
        num_processes: Number of processes that share each batch.
        process_index: Index of this process, counted from 0.
        redraw: Returns the lengths of an epoch, counted from 0; None: every epoch has the same.

    Attributes:
        epoch: Epoch of the next iteration, set by `set_epoch`.
        tokens: Tokens of an epoch without padding, over all processes together; the same in each
            epoch unless lengths are drawn again.
        padding: Share of padding in the batches of an epoch, 0 to 1; also the same in each.

    Raises:
        ValueError: If there are no pairs, one exceeds the budget, or a process would get none.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        seed: int,
        num_processes: int = 1,
        process_index: int = 0,
        redraw: Callable[[int], Lengths] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.seed = seed
        self.num_processes = num_processes
        self.process_index = process_index
        self.epoch = 0
        self._redraw = redraw
        self._arrange(lengths, max_tokens)
        self._batches = len(self._starts)
        if redraw:
            planned = self._batches + math.ceil(_SPARE_BATCHES * self._batches)
            # Halving can always make this many batches.
            most = len(lengths) // (2 * num_processes - 1)
            self._batches = max(self._batches, min(planned, most))

    def _arrange(self, lengths: Lengths, max_tokens: int) -> None:
        """Sorts the pairs and cuts them into batches of this budget."""
        if len(lengths) < self.num_processes:
            raise ValueError(
                f"Each process needs a pair of its own, got {len(lengths)} pairs for "
                f"{self.num_processes} processes."
            )
        source, target = np.asarray(lengths, dtype=np.int64).T
        longest = int((source + target).argmax())
        if (tokens := source[longest] + target[longest]) > max_tokens:
            raise ValueError(
                f"`max_tokens` must hold the longest pair, got {max_tokens} for pair {longest} "
                f"(counted from 0) of {tokens} tokens. Raise `max_tokens`, or truncate pairs "
                "to a smaller `max_length`."
            )
        # The shorter side grows for one length of the longer side and shrinks for the next, so
        # that neighbours are always similar on both sides.
        longer_side, difference = np.maximum(source, target), source - target
        self._sort_keys = np.where(longer_side % 2, difference, -difference), longer_side

        order = np.lexsort(self._sort_keys)
        source, target = source[order], target[order]
        self._starts = _cut(source, target, max_tokens, self.num_processes)
        sizes = np.diff(self._starts, append=len(order))
        costs = np.maximum.reduceat(source, self._starts)
        costs += np.maximum.reduceat(target, self._starts)
        costs *= sizes
        if sizes.min() < self.num_processes or costs.max() > max_tokens:
            enough = 2 * self.num_processes * int(source.max() + target.max())
            raise ValueError(
                f"Each of {self.num_processes} processes needs a pair of every batch, and "
                f"`max_tokens` = {max_tokens} is too small for that. {enough} is always "
                "enough for these pairs; or use fewer processes."
            )
        self.tokens = int((source + target).sum())
        self.padding = float(1 - self.tokens / costs.sum())

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = np.lexsort((rng.random(len(self._sort_keys[0])), *self._sort_keys))
        starts = _halve_largest(self._starts, len(order), self._batches, self.num_processes)
        batches = np.split(order, starts[1:])
        for index in rng.permutation(len(batches)):
            yield batches[index][self.process_index :: self.num_processes].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration, counted from 0."""
        if self._redraw and epoch != self.epoch:
            lengths, budget = self._redraw(epoch), self.max_tokens
            while True:
                # Until the longest pair has room, and batches are few enough.
                with suppress(ValueError):
                    self._arrange(lengths, budget)
                    if len(self._starts) <= self._batches:
                        break
                budget += math.ceil(budget / 100)
        self.epoch = epoch


def _cut(
    source: npt.NDArray[np.int64],
    target: npt.NDArray[np.int64],
    max_tokens: int,
    num_processes: int,
) -> npt.NDArray[np.int64]:
    """Indices of the sorted pairs at which batches start."""
    starts = [0]
    longest_source = longest_target = 0
    for index, (source_tokens, target_tokens) in enumerate(
        zip(source.tolist(), target.tolist(), strict=True)
    ):
        longest_source = max(longest_source, source_tokens)
        longest_target = max(longest_target, target_tokens)
        if (index + 1 - starts[-1]) * (longest_source + longest_target) > max_tokens:
            starts.append(index)
            longest_source, longest_target = source_tokens, target_tokens
    # The last batch may have too few pairs for all processes.
    if len(starts) > 1:
        starts[-1] = min(starts[-1], len(source) - num_processes)
    return np.array(starts)


def _halve_largest(
    starts: npt.NDArray[np.int64], pairs: int, batches: int, num_processes: int
) -> npt.NDArray[np.int64]:
    """Halves the batches with the most pairs until there are `batches` of them."""
    while len(starts) < batches:
        sizes = np.diff(starts, append=pairs)
        largest = int(sizes.argmax())
        if sizes[largest] < 2 * num_processes:
            raise ValueError(
                f"{pairs} pairs are too few for {batches} batches and {num_processes} processes. "
                "Train on more pairs or without BPE-dropout."
            )
        starts = np.insert(starts, largest + 1, starts[largest] + sizes[largest] // 2)
    return starts


def padded(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Rows of unequal length, padded on the right, and their mask (1 = real), `[B, longest]`."""
    ids = pad_sequence(
        [torch.tensor(row, dtype=torch.long) for row in rows],
        batch_first=True,
        padding_value=filler,
    )
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()
