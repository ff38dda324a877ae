#!/usr/bin/env python
r"""Training speed and memory against M2M100 and Marian of the same size, on identical batches.

The seconds of a round are those of forward, backward and Adam over all batches, after a round that
does not count. The table has the tokens of both sides per second without padding, their range, and
the speed as a multiple of the first line's. Memory is measured in a process for each contender:
growth is what a step adds to weights, gradients and Adam's state, also as a multiple of the first
line's. With --profile a second table has the share of a round that kinds of operations take in the
first model.

Examples:
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes tiny base
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes tiny --variants \
      --models default 'talking heads*' --compile
  python benchmarks/training.py --corpus train.de.gz train.en.gz --sizes base --profile
"""

import fnmatch
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForSeq2Seq

from kernels import profile_table
from lab import PRESETS, Report, benchmark_parser
from neighbours import FAMILIES, Training, build, compare_training
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools import settings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

VOCABULARY = {"tiny": 10_000, "small": 32_000, "base": 32_000, "big": 37_000}
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
    # Sizes of heads are multiples of the default.
    "d_k doubled": {"d_k": 2},
    "d_k and d_v doubled": {"d_k": 2, "d_v": 2},
    "talking heads, logits": {"talking_heads": "logits"},
    "talking heads, weights": {"talking_heads": "weights"},
    "talking heads, both": {"talking_heads": "both"},
}


def main() -> None:
    """Prints one table for each size and dtype."""
    parser = benchmark_parser(__doc__, sizes=("tiny", "base"), known=PRESETS, rounds=5)
    parser.add_argument("--corpus", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--variants", action="store_true", help="Compare variants of our model.")
    parser.add_argument("--models", nargs="+", default=["*"], help="Their names, or patterns.")
    parser.add_argument("--compile", action="store_true", help="Compile their layers.")
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
        cut = batches(options.corpus, VOCABULARY[size], options.tokens, options.batches)
        for dtype in options.dtypes:
            setting = (size, VOCABULARY[size], cut, dtype)
            compiler = "inductor" if options.compile else None
            models = {name: (name, *setting, 0.0, compiler) for name in chosen}
            note = f"{size}, {dtype}{', compiled' if options.compile else ''}"
            note += f", vocabulary {VOCABULARY[size]:,}"
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


def contender(name: str, size: str, vocab_size: int, *setting: Any) -> Training:
    """A family, or a variant of our model, that trains; `setting` is for `Training`."""
    sizes = settings.PRESETS[size].config() | {"dropout": 0.1}
    head = sizes["d_model"] // sizes["encoder_attention_heads"]
    for field, value in VARIANTS.get(name, {}).items():
        sizes[field] = value * head if field in ("d_k", "d_v") else value
    family = name if name in FAMILIES else "vanilla"
    return Training(build(family, vocab_size=vocab_size, **sizes), *setting)


if __name__ == "__main__":
    main()
