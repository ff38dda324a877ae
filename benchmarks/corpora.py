"""Batches of parallel text, and of random tokens, for benchmarks."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForSeq2Seq

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.batches import TokenBatchSampler
from vanilla_transformer.data.parallel_text import ParallelText, load_pairs
from vanilla_transformer.data.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair

END = 2


def batches(
    corpus: list[str], vocab_size: int, max_tokens: int, count: int, unsorted: bool = False
) -> list[BatchEncoding]:
    """The first batches of an epoch over a parallel corpus.

    Args:
        corpus: Source and target file.
        vocab_size: Entries of the joint vocabulary.
        max_tokens: Most tokens of a batch, padding counted.
        count: Number of batches.
        unsorted: Draws pairs at random instead, in batches with `max_tokens` on average, not
            counting padding.
    """
    pairs = load_pairs(ParallelText(tuple(corpus)))
    texts = (text for column in ("source", "target") for text in pairs[column])
    tokenizer = VanillaTransformerTokenizer.train(texts, vocab_size=vocab_size)
    data, _ = tokenize_pairs(pairs, TokenizerPair.joint(tokenizer), max_length=256)
    data = data.select_columns(["input_ids", "labels"])
    lengths = pair_lengths(data)
    cut: dict[str, Any] = {"batch_sampler": TokenBatchSampler(lengths, max_tokens, seed=0)}
    if unsorted:
        pairs = int(max_tokens / lengths.sum(axis=1).mean())
        seeded = torch.Generator().manual_seed(0)
        cut = {"batch_size": pairs, "shuffle": True, "generator": seeded}
    loader = DataLoader(data, collate_fn=DataCollatorForSeq2Seq(tokenizer), **cut)
    return list(islice(loader, count))


def random_batches(
    lengths: np.ndarray,
    rows: Iterable[Iterable[int]],
    vocab_size: int,
    pad: int = 0,
    end: int = END,
) -> list[BatchEncoding]:
    """Batches of random tokens, the same at each call.

    Args:
        lengths: Tokens of both sides of each pair, the end counted, `[pairs, 2]`.
        rows: Pairs of each batch.
        vocab_size: Entries of the vocabulary.
        pad: Padding of sources; targets have -100.
        end: Last token of a sentence.
    """
    generator = torch.Generator().manual_seed(0)

    def side(sizes: Iterable[int], filler: int) -> torch.Tensor:
        # The last id is Marian's padding.
        bounds = (4, vocab_size - 1)
        words = [torch.randint(*bounds, (int(n),), generator=generator) for n in sizes]
        for word in words:
            word[-1] = end
        return pad_sequence(words, batch_first=True, padding_value=filler)

    cut = []
    for indices in rows:
        input_ids, labels = (side(lengths[indices, i], (pad, -100)[i]) for i in (0, 1))
        mask = (input_ids != pad).long()
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        cut.append(BatchEncoding(batch))
    return cut
