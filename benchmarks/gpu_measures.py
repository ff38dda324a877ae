"""What benchmarks/gpu.py measures with: batches like WMT's, memory and peaks."""

import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedConfig

from lab import best_device, wait_for_gpu
from neighbours import random_batches
from vanilla_transformer_tools.text.batches import TokenBatchSampler

# Dense bfloat16 products with float32 sums, in TFLOP/s, from the makers' data sheets. The first
# name that a device's name contains as words decides.
BF16_PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "A10": 125,
    "A10G": 70,
    "L4": 121,
    "L40S": 362,
    "RTX A6000": 155,
    "RTX 4090": 165,
}
# Pairs of WMT14 en-de have some 28 tokens a side with 37,000 BPE entries: a log-normal
# distribution, and targets somewhat longer than sources.
MEDIAN_LENGTH, SPREAD, LONGEST = 23.0, 0.65, 250
RATIO, RATIO_SPREAD = 1.05, 0.2
# So many times the batches needed are drawn, so that pairs of similar length are found.
POOL = 20


def bf16_peak(device_name: str) -> int | None:
    """Dense bfloat16 peak in TFLOP/s; None for a device that is not in the table."""
    for name, peak in BF16_PEAKS.items():
        if re.search(rf"\b{name}\b", device_name):
            return peak
    return None


def share_of_peak(flops: int, seconds: float) -> float | None:
    """Percent of the device's peak; None if that is not known."""
    peak = bf16_peak(torch.cuda.get_device_name()) if best_device() == "cuda" else None
    return 100 * flops / seconds / (1e12 * peak) if peak else None


def growth_of(work: Callable[[], Any]) -> float | None:
    """What a call adds to the GPU's memory at its peak, in MB; None without a GPU."""
    if best_device() == "cpu":
        work()
        return None
    wait_for_gpu()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait_for_gpu()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def wmt_like_batches(tokens: int, count: int, vocab_size: int) -> list[BatchEncoding]:
    """Batches of random tokens in sentences as long as WMT's.

    Args:
        tokens: Most tokens of a batch, both sides, padding counted.
        count: Number of batches.
        vocab_size: Entries of the vocabulary.
    """
    draw = np.random.default_rng(0)
    pairs = int(POOL * count * tokens / MEDIAN_LENGTH / 2)
    source = draw.lognormal(np.log(MEDIAN_LENGTH), SPREAD, pairs)
    target = source * draw.lognormal(np.log(RATIO), RATIO_SPREAD, pairs)
    longest = min(LONGEST, tokens // 4)
    lengths = np.stack((source, target), axis=1).round().astype(int).clip(2, longest)
    sampler = TokenBatchSampler(lengths, tokens, seed=0)
    return random_batches(lengths, islice(sampler, count), vocab_size)


def training_flops(config: PreTrainedConfig, cut: list[BatchEncoding]) -> int:
    """Floating-point operations of matrix products in a forward and a backward pass.

    Only real tokens count. A product of a row with a matrix of n parameters costs 2 n operations
    forward and 4 n backward. With S and T tokens a sentence, widths D and F, and V entries:

    - encoder, a layer: S (4 D^2 + 2 D F) parameters' products and two products [S, S, D];
    - decoder, a layer: T (4 D^2 + 2 D F) and two products [T, T, D] of self-attention; T 2 D^2 and
      S 2 D^2 (keys and values) and two products [T, S, D] of cross-attention;
    - output projection: T D V.

    As is usual, the causal mask is not deducted, and neither softmax, norms, dropout, the gather of
    embeddings nor the optimizer count.
    """
    width, vocabulary = config.d_model, config.vocab_size
    total = 0
    for batch in cut:
        source = batch["attention_mask"].sum(1).double()
        target = (batch["labels"] != -100).sum(1).double()
        attention = 4 * width**2
        encoder = source * (attention + 2 * width * config.encoder_ffn_dim)
        encoder += 2 * source**2 * width
        decoder = target * (attention + 2 * width * config.decoder_ffn_dim)
        decoder += 2 * target**2 * width
        decoder += 2 * width**2 * (source + target) + 2 * source * target * width
        products = config.encoder_layers * encoder + config.decoder_layers * decoder
        products += target * width * vocabulary
        total += round(float(products.sum()))
    # A multiplication and an addition; the backward pass has two products for each.
    return 3 * 2 * total
