"""Batches of parallel text for benchmarks."""

from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForSeq2Seq

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair


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
