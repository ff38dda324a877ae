#!/usr/bin/env python
r"""Training speed and memory against M2M100 and Marian of the same size, on identical batches.

The seconds of a round are those of forward, backward and Adam over all batches, after a round that
does not count. The table has the tokens of both sides per second without padding, their range, and
the speed as a multiple of the first line's. Memory is measured in a process for each contender:
growth is what a step adds to weights, gradients and Adam's state. With --profile a second table has
the share of a round that kinds of operations take in the first model.

Examples:
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes tiny base
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes tiny --variants \
      --models default 'talking heads*' --compile
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes base --profile
"""

import argparse
import fnmatch
import sys
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForSeq2Seq

from kernels import profile_table
from lab import PRESETS, Memory, Report, benchmark_parser, megabytes, speed_cells, take_turns
from neighbours import Training, build, padding_of, steps_alone, tokens_of
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools import settings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

COLUMNS = ("model", "tokens/s", "range", "speed", "growth MB", "peak MB", "start MB", "state MB")
VOCABULARY = {"tiny": 10_000, "small": 32_000, "base": 32_000, "big": 37_000}
FAMILIES = {name: (name, {}) for name in ("vanilla", "m2m100", "marian")}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager attention": {"attn_implementation": "eager"},
    "post-norm": {"pre_norm": False},
    "norm of embeddings": {"embedding_layer_norm": True},
    "learned positions": {"position_embedding_type": "learned"},
    "separate tables": {"share_encoder_decoder_embeddings": False},
    "untied projection": {"tie_word_embeddings": False},
    "projection with bias": {"lm_head_bias": True},
    "attention without biases": {"attention_bias": False},
    "d_k doubled": {"d_k": 2},
    "d_k and d_v doubled": {"d_k": 2, "d_v": 2},
    "talking heads, logits": {"talking_heads": "logits"},
    "talking heads, weights": {"talking_heads": "weights"},
    "talking heads, both": {"talking_heads": "both"},
}


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = benchmark_parser(__doc__, sizes=("tiny", "base"), known=PRESETS, rounds=5)
    parser.add_argument("--corpus", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--variants", action="store_true", help="Compare variants of our model.")
    parser.add_argument("--models", nargs="+", default=["*"], help="Their names, or patterns.")
    parser.add_argument("--compile", action="store_true", help="Compile their layers.")
    parser.add_argument("--unsorted", action="store_true", help="Draw pairs at random.")
    parser.add_argument("--profile", action="store_true", help="Also shares of operations.")
    parser.add_argument("--tokens", type=int, default=4096, help="Tokens per batch, both sides.")
    parser.add_argument("--batches", type=int, default=4, help="Batches per round (default: 4).")
    parser.add_argument("--label_smoothing", type=float, default=0.0, help="(default: 0)")
    return parser.parse_args()


def main() -> int:
    """Prints one table for each size and dtype; returns the exit status."""
    options, report = parse(), None
    for size in options.sizes:
        known = variants(size) if options.variants else FAMILIES
        chosen = [name for name in known if any(fnmatch.fnmatch(name, p) for p in options.models)]
        if not chosen:
            names = ", ".join(known)
            print(f"--models must name some of {names}, got {options.models}.", file=sys.stderr)
            return 2
        report = report or Report(options.output)
        for dtype in options.dtypes:
            compare(report, size, dtype, {name: known[name] for name in chosen}, options)
    return 0


def variants(size: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Family and changed fields of each variant; sizes of heads are multiples of the default."""
    sizes = settings.PRESETS[size].config()
    head = sizes["d_model"] // sizes["encoder_attention_heads"]
    return {
        name: ("vanilla", {k: v * head if k in ("d_k", "d_v") else v for k, v in fields.items()})
        for name, fields in VARIANTS.items()
    }


def batches(
    corpus: list[str], vocab_size: int, max_tokens: int, count: int, unsorted: bool = False
) -> list[BatchEncoding]:
    """The first batches of an epoch over a parallel corpus, of at most `max_tokens`.

    Unsorted, pairs are drawn at random, with `max_tokens` on average and padding not counted.
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


def compare(
    report: Report,
    size: str,
    dtype: str,
    models: dict[str, tuple[str, dict[str, Any]]],
    options: argparse.Namespace,
) -> None:
    """Adds a table of all contenders."""
    vocab_size = VOCABULARY[size]
    cut = batches(options.corpus, vocab_size, options.tokens, options.batches, options.unsorted)
    compiler = "inductor" if options.compile else None
    setting = (size, vocab_size, cut, dtype, options.label_smoothing, compiler)
    contenders = {name: contender(*model, *setting) for name, model in models.items()}
    runs = {name: each.run for name, each in contenders.items()}
    seconds = take_turns(runs, options.rounds, warm_ups=1)
    tokens = tokens_of(cut)
    setup = f"{size}, {dtype}, vocabulary {vocab_size:,}, {tokens:,} tokens in {len(cut)} batches"
    padding = f"{100 * padding_of(cut):.1f} % padding"
    report.table(f"{setup}, {padding}{', compiled' if options.compile else ''}", *COLUMNS)
    first = next(iter(seconds))
    for name, times in seconds.items():
        memory = memory_cells(steps_alone(contender, *models[name], *setting))
        report.row(name, *speed_cells(tokens, times, seconds[first]), *memory)
    if options.profile:
        profile_table(report, f"{first}: {setup}", runs[first])


def contender(
    family: str, changes: dict[str, Any], size: str, vocab_size: int, *setting: Any
) -> Training:
    """A model of a family, with changed fields, that trains; `setting` is for `Training`."""
    sizes = settings.PRESETS[size].config() | {"dropout": 0.1} | changes
    return Training(build(family, vocab_size=vocab_size, **sizes), *setting)


def memory_cells(memory: Memory) -> list[str]:
    """The last columns of a contender, whose process has returned the bytes of its state."""
    state = memory.result
    return megabytes(memory.growth - state, memory.peak, memory.start, state)


if __name__ == "__main__":
    sys.exit(main())
