"""BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267): each epoch splits words differently.

The dropout of `tokenizers` cannot be seeded. Here a segmentation depends only on seed, epoch and
place in the corpus, so it is the same with any number of processes and after resuming.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.text.token_ids import source_prefixes, truncate
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# Segmentations of a word to choose from in an epoch; a rare word has one for each occurrence.
POOL_SIZE = 8

# Time grows with the square of a word's characters, so longer words are cut first.
LONGEST_WORD = 100

_LINES_AT_A_TIME = 10_000

# Ids of two neighbours -> rank of their merge (the lowest comes first) and id of the result.
Merges = dict[tuple[int, int], tuple[int, int]]


def segment(symbols: list[int], merges: Merges, rate: float, draw: Callable[[], float]) -> None:
    """Merges the ids of a word's characters in place, algorithm 1 of the paper.

    The share `rate` of the possible merges is skipped; `draw` returns random numbers from 0 to 1,
    and they are drawn again after each merge.
    """
    while True:
        possible = [
            (*merge, place)
            for place, pair in enumerate(pairwise(symbols))
            if (merge := merges.get(pair)) and draw() >= rate
        ]
        if not possible:
            return
        _, merged, place = min(possible, key=lambda merge: (merge[0], merge[2]))
        symbols[place : place + 2] = [merged]


class SegmentedLines:
    """Lines of text whose words are split into different pieces in each epoch.

    Args:
        tokenizer: With a BPE model, as `VanillaTransformerTokenizer.train` returns it.
        texts: The lines.
        argument: Of the tokenizer for them: `text`, or `text_target` for lines of the target.
        rate: Of the dropout, 0 to 1; the paper uses 0.1.
        seed: Any text; determines, together with the epoch, all segmentations.

    Raises:
        ValueError: If the tokenizer has no BPE model, or the rate is out of range.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str],
        *,
        rate: float,
        seed: str,
        argument: str = "text",
    ) -> None:
        model: dict[str, Any] = {"type": type(tokenizer).__name__}
        if tokenizer.is_fast:
            model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        if model["type"] != "BPE" or not 0 <= rate < 1:
            raise ValueError(
                "BPE-dropout needs a BPE vocabulary and a rate of at least 0 and below 1, got "
                f"{model['type']} and {rate}. Choose --tokenizer_kind bpe, or leave it out."
            )
        vocabulary: dict[str, int] = model["vocab"]
        self._merges: Merges = {
            (vocabulary[left], vocabulary[right]): (rank, vocabulary[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._rate = rate
        self._seed = seed
        halves = {merged: pair for pair, (_, merged) in self._merges.items()}

        def characters(token: int) -> list[int]:
            if token not in halves:
                return [token]
            left, right = halves[token]
            return characters(left) + characters(right)

        # Of words, by their pieces without dropout. Other tokens, such as `</s>`, count as words.
        numbers: dict[tuple[int, ...], int] = {}
        words: list[int] = []
        starts = [0]
        for first in range(0, len(texts), _LINES_AT_A_TIME):
            lines = list(texts[first : first + _LINES_AT_A_TIME])
            for encoding in tokenizer(**{argument: lines}, verbose=False).encodings:
                tokens = zip(encoding.word_ids, encoding.ids, strict=True)
                for _, pieces in groupby(tokens, key=lambda token: token[0]):
                    word = tuple(token for _, token in pieces)
                    words.append(numbers.setdefault(word, len(numbers)))
                starts.append(len(words))
        self._characters = [list(chain.from_iterable(map(characters, word))) for word in numbers]
        self._words = np.array(words)
        self._starts = np.array(starts)
        occurrences = np.bincount(self._words, minlength=len(numbers))
        self._pool_sizes = np.minimum(occurrences, POOL_SIZE)

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        """Draws the segmentations of an epoch, counted from 0.

        Returns:
            The number of tokens in each line, `[lines]`, `</s>` counted.
        """
        name = f"{self._seed} {epoch}"
        uniform = random.Random(name).random
        self._pool: list[list[int]] = []
        for characters, size in zip(self._characters, self._pool_sizes.tolist(), strict=True):
            for _ in range(size):
                pieces: list[int] = []
                for start in range(0, len(characters), LONGEST_WORD):
                    part = characters[start : start + LONGEST_WORD]
                    segment(part, self._merges, self._rate, uniform)
                    pieces += part
                self._pool.append(pieces)
        first_of_word = np.cumsum(self._pool_sizes) - self._pool_sizes
        chances = np.random.default_rng(list(name.encode())).random(len(self._words))
        choices = (chances * self._pool_sizes[self._words]).astype(np.int64)
        self._chosen = first_of_word[self._words] + choices
        pieces_of = np.array([len(pieces) for pieces in self._pool])
        return np.add.reduceat(pieces_of[self._chosen], self._starts[:-1])

    def __getitem__(self, line: int) -> list[int]:
        """Tokens of a line, as last drawn."""
        chosen = self._chosen[self._starts[line] : self._starts[line + 1]].tolist()
        return [token for choice in chosen for token in self._pool[choice]]


class SegmentedPairs(Dataset[dict[str, list[int]]]):
    """Pairs with BPE-dropout on both sides; replaces the dataset that `tokenize_pairs` returns.

    Tokenizers and rate are as for `SegmentedLines`. A side keeps `max_length` tokens, the last of
    which is `</s>`.

    Attributes:
        truncated_pairs: Number of pairs in the epoch with a truncated side.
    """

    def __init__(
        self,
        tokenizers: TokenizerPair,
        pairs: Mapping[str, Sequence[str]],
        *,
        rate: float,
        seed: int,
        max_length: int,
    ) -> None:
        sides = [
            ("input_ids", tokenizers.source, "source", "text"),
            ("labels", tokenizers.target, "target", "text_target"),
        ]
        self._sides = {}
        for column, tokenizer, side, argument in sides:
            # As `encode_pairs` reads them.
            texts = list(map(without_blank_ends, pairs[side]))
            self._sides[column] = SegmentedLines(
                tokenizer, texts, rate=rate, seed=f"{seed} {column}", argument=argument
            )
        self._prefixes = source_prefixes(pairs.get("tag"), len(pairs["source"]), tokenizers)
        self._max_length = max_length
        self._epoch: int | None = None
        self.draw(0)

    def draw(self, epoch: int) -> npt.NDArray[np.int64]:
        """Draws an epoch; returns the tokens of source and target of each pair, `[pairs, 2]`."""
        if epoch != self._epoch:
            lengths = np.stack([side.draw(epoch) for side in self._sides.values()], axis=1)
            lengths[:, 0] += len(self._prefixes[0])
            self.truncated_pairs = int((lengths > self._max_length).any(axis=1).sum())
            self._lengths = np.minimum(lengths, self._max_length)
            self._epoch = epoch
        return self._lengths

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._prefixes)

    def __getitem__(self, pair: int) -> dict[str, list[int]]:
        """`input_ids` and `labels` of a pair, as last drawn."""
        ids = {column: side[pair] for column, side in self._sides.items()}
        ids["input_ids"] = [*self._prefixes[pair], *ids["input_ids"]]
        return {column: truncate(side, self._max_length) for column, side in ids.items()}
