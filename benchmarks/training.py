#!/usr/bin/env python
r"""Training speed and memory against M2M100 and Marian of the same size, on identical batches.

The seconds of a round are those of forward, backward and Adam over all batches, after a round that
does not count. The table has the tokens of both sides per second without padding, their range, the
speed as a multiple of the first line's, and the operations of matrix products. Memory is measured
in a process for each contender, on a GPU if there is one: growth is what a step adds to weights,
gradients and Adam's state, also as a multiple of the first line's. With --profile a second table
has the share of a round that kinds of operations take in the first model.

Without --corpus, batches have random tokens in sentences as long as those of WMT.

Examples:
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes tiny base
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes tiny --variants \
      --models default 'talking heads*' --compile
  python benchmarks/training.py --sizes base big --tokens 50000 --dtypes bfloat16 --profile
"""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForSeq2Seq

from lab import PRESETS, Report, benchmark_parser, seconds_of, wait_for_gpu
from neighbours import FAMILIES, Training, build, compare_training, random_batches
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

VOCABULARY = {"tiny": 10_000, "small": 32_000, "base": 32_000, "big": 37_000}
COMPILER = "inductor"
# WMT's is no multiple of 64.
WMT_VOCABULARY = 37_000
# Pairs of WMT14 en-de have some 28 tokens a side with 37,000 BPE entries: a log-normal
# distribution, and targets somewhat longer than sources.
MEDIAN_LENGTH, SPREAD, LONGEST = 23.0, 0.65, 250
RATIO, RATIO_SPREAD = 1.05, 0.2
# So many times the batches needed are drawn, so that pairs of similar length are found.
POOL = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager attention": {"attn_implementation": "eager"},
    "post-norm": {"pre_norm": False},
    "norm of embeddings": {"embedding_layer_norm": True},
    "RMSNorm": {"norm_type": "rms_norm"},
    "learned positions": {"position_embedding_type": "learned"},
    "rotary positions": {"position_embedding_type": "rotary"},
    "separate tables": {"share_encoder_decoder_embeddings": False},
    "untied projection": {"tie_word_embeddings": False},
    "projection with bias": {"lm_head_bias": True},
    "attention without biases": {"attention_bias": False},
    # Sizes of heads are multiples of the default.
    "d_k doubled": {"d_k": 2},
    "d_k and d_v doubled": {"d_k": 2, "d_v": 2},
    "talking heads, logits": {"talking_heads": "logits"},
    "talking heads, weights": {"talking_heads": "weights"},
    "talking heads, both": {"talking_heads": "both"},
}
# The first pattern that a name contains decides; GPU kernels first, then operations of a CPU.
KINDS = (
    ("optimizer", r"adam|multi_tensor_apply|_foreach"),
    ("attention", r"flash|fmha|sdpa|attention|softmax_warp"),
    ("products", r"gemm|gemv|cutlass|sm\d+_x|cublas|nvjet|\bmm\b|addmm|bmm|matmul|linear"),
    ("loss", r"softmax|nll|cross_entropy|logsumexp"),
    ("norms", r"layer_?norm|GammaBeta"),
    ("copies and casts", r"copy|memcpy|memset|fill|zero_|cat\b|CatArray|clone"),
    ("gathers and scatters", r"index|embedding|gather|scatter|sort|select"),
    ("pointwise and sums", r""),
)


def main() -> None:
    """Prints one table for each size and dtype."""
    parser = benchmark_parser(__doc__, sizes=("tiny", "base"), rounds=5)
    parser.add_argument("--corpus", nargs=2, help="Source and target file.")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--variants", action="store_true", help="Compare variants of our model.")
    parser.add_argument("--models", nargs="+", default=["*"], help="Their names, or patterns.")
    parser.add_argument("--compile", action="store_true", help="Ours also with compiled layers.")
    parser.add_argument("--profile", action="store_true", help="Also shares of operations.")
    parser.add_argument("--tokens", type=int, default=4096, help="Tokens per batch, both sides.")
    parser.add_argument("--batches", type=int, default=4, help="Batches per round (default: 4).")
    options = parser.parse_args()
    known = VARIANTS if options.variants else FAMILIES
    chosen = [name for name in known if any(fnmatch.fnmatch(name, p) for p in options.models)]
    if not chosen:
        parser.error(f"--models must name some of {', '.join(known)}, got {options.models}")
    report = Report(options.output)
    for size in options.sizes:
        if options.corpus:
            vocab_size = VOCABULARY[size]
            cut = batches(options.corpus, vocab_size, options.tokens, options.batches)
        else:
            vocab_size = WMT_VOCABULARY
            cut = wmt_like_batches(options.tokens, options.batches, vocab_size)
        for dtype in options.dtypes:
            setting = (size, vocab_size, cut, dtype)
            models = {name: (name, *setting) for name in chosen}
            if options.compile:
                ours = [name for name in chosen if name not in ("m2m100", "marian")]
                models |= {f"{name}, compiled": (name, *setting, COMPILER) for name in ours}
            note = f"{size}, {dtype}, vocabulary {vocab_size:,}"
            compare_training(report, note, options.rounds, contender, models)
            if options.profile:
                profile_table(report, f"{chosen[0]}: {note}", contender(*models[chosen[0]]).run)


def batches(corpus: list[str], vocab_size: int, max_tokens: int, count: int) -> list[BatchEncoding]:
    """The first batches of an epoch over a parallel corpus, of at most `max_tokens`."""
    pairs = load_pairs(ParallelText(tuple(corpus)))
    texts = (text for column in ("source", "target") for text in pairs[column])
    tokenizer = VanillaTransformerTokenizer.train(texts, vocab_size=vocab_size)
    data, _ = tokenize_pairs(pairs, TokenizerPair.joint(tokenizer), max_length=256)
    data = data.select_columns(["input_ids", "labels"])
    sampler = TokenBatchSampler(pair_lengths(data), max_tokens, seed=0)
    collate = DataCollatorForSeq2Seq(tokenizer)
    return list(islice(DataLoader(data, batch_sampler=sampler, collate_fn=collate), count))


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


def contender(name: str, size: str, vocab_size: int, *setting: Any) -> Training:
    """A family, or a variant of our model, that trains; `setting` is for `Training`."""
    sizes = PRESETS[size].config() | {"dropout": 0.1}
    head = sizes["d_model"] // sizes["encoder_attention_heads"]
    for field, value in VARIANTS.get(name, {}).items():
        sizes[field] = value * head if field in ("d_k", "d_v") else value
    family = name if name in FAMILIES else "vanilla"
    return Training(build(family, vocab_size=vocab_size, **sizes), *setting)


def kind_of(name: str) -> str:
    """The kind of a kernel or an operation."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def shares(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of each kind in a call, and those in which the device waits for work, `gaps`.

    On a GPU the seconds are those of its kernels; on a CPU those of operations without the ones
    that they call. The gaps are what these leave of the time of a call without the profiler, so
    that its own cost is not in them.
    """
    work()
    total = seconds_of(work)
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        work()
        wait_for_gpu()
    found: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        micro = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # Calls of the driver, and marks of the profiler, are no work.
        if micro and not re.match(r"cuda[A-Z]|cuda::|ProfilerStep", event.key):
            found[kind_of(event.key)] += micro / 1e6
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    return ordered | {"gaps": max(0.0, total - sum(found.values())), "all": total}


def profile_table(report: Report, note: str, work: Callable[[], object]) -> None:
    """Adds a table of the kinds of operations of a call."""
    found = shares(work)
    report.table(f"Profile of {note}", "operations", "ms", "share, %")
    for kind, seconds in found.items():
        report.row(kind, f"{1000 * seconds:.3g}", f"{100 * seconds / found['all']:.1f}")


if __name__ == "__main__":
    main()
