#!/usr/bin/env python
r"""Training speed and memory against M2M100 and Marian of the same size, on identical batches.

In each round, all contenders train on the same batches in turn. The time of a round covers forward,
backward and Adam; the table shows the median, and its ratio to that of the first line. Memory is
measured in a process for each contender. Tokens are counted without padding.

Examples:
  python benchmarks/training.py --corpus train.de.gz train.en.gz --presets tiny base
  python benchmarks/training.py --corpus train.de.gz train.en.gz --presets tiny --variants
  python benchmarks/training.py --corpus train.de.gz train.en.gz --presets tiny --variants \
      --models default 'talking heads*' --compile
  python benchmarks/training.py --corpus train.de.gz train.en.gz --presets tiny --variants \
      --models default 'no padding' --unsorted
  python benchmarks/training.py --corpus train.de.gz train.en.gz --presets base --products
"""

import argparse
import fnmatch
import sys
from typing import TYPE_CHECKING

from ratio_tables import head, megabytes, rate, rate_range, ratio, row

if TYPE_CHECKING:
    from memory import Memory

COLUMNS = ("model", "tokens/s", "range", "time")
COLUMNS += ("growth MB", "peak MB", "start MB", "state MB")
VOCABULARY = {"tiny": 10_000, "small": 32_000, "base": 32_000, "big": 37_000}


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--corpus", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--presets", nargs="+", default=["tiny", "base"], choices=VOCABULARY)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--variants", action="store_true", help="Compare variants of our model instead."
    )
    parser.add_argument("--models", nargs="+", default=["*"], help="Their names, or patterns.")
    parser.add_argument("--compile", action="store_true", help="Compile their layers.")
    parser.add_argument(
        "--unsorted", action="store_true", help="Draw pairs at random, as Trainer does by default."
    )
    parser.add_argument(
        "--products", action="store_true", help="Also time the matrix products alone."
    )
    parser.add_argument("--tokens", type=int, default=4096, help="Tokens per batch, both sides.")
    parser.add_argument("--rounds", type=int, default=5, help="Timed rounds (default: 5).")
    parser.add_argument("--batches", type=int, default=4, help="Batches per round (default: 4).")
    parser.add_argument("--label_smoothing", type=float, default=0.0, help="(default: 0)")
    return parser.parse_args()


def main() -> int:
    """Prints one table for each preset and dtype; returns the exit status."""
    options = parse()
    # Imported late: it loads torch, and `--help` should answer at once.
    from neighbours import families, our_variants

    for preset in options.presets:
        known = our_variants(preset) if options.variants else families()
        chosen = [name for name in known if any(fnmatch.fnmatch(name, p) for p in options.models)]
        if not chosen:
            names = ", ".join(known)
            print(f"--models must name some of {names}, got {options.models}.", file=sys.stderr)
            return 2
        for dtype in options.dtypes:
            print_table(preset, dtype, {name: known[name] for name in chosen}, options)
    return 0


def print_table(
    preset: str,
    dtype: str,
    models: dict[str, tuple[str, dict[str, object]]],
    options: argparse.Namespace,
) -> None:
    """Times the contenders in turn, and measures the memory of each in a process of its own."""
    from corpora import batches
    from matrix_products import MatrixProducts
    from memory import measure_alone
    from neighbours import Training, hardware_line, padding_of, run_steps, tokens_of
    from rounds import take_turns

    vocab_size = VOCABULARY[preset]
    size = (options.tokens, options.batches, options.unsorted)
    cut = batches(options.corpus, vocab_size, *size)
    compiler = "inductor" if options.compile else None
    setting = (preset, vocab_size, dtype, options.label_smoothing, compiler, cut)
    contenders = {name: Training(*model, *setting).run for name, model in models.items()}
    if options.products:
        products = {f"{name}, products": MatrixProducts(run) for name, run in contenders.items()}
        contenders |= {name: each.run for name, each in products.items()}
    seconds = take_turns(contenders, options.rounds, warm_ups=1)
    tokens = tokens_of(cut)
    print(
        f"\n{preset}, {dtype}, vocabulary {vocab_size:,}, "
        f"{tokens:,} tokens in {options.batches} batches, {100 * padding_of(cut):.1f} % padding; "
        f"{hardware_line()}"
        f"{', compiled' if options.compile else ''}"
    )
    print(head(*COLUMNS))
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        speeds = (rate(tokens, times), rate_range(tokens, times), ratio(times, first))
        memory = ["-"] * 4
        if name in models:
            memory = memory_cells(measure_alone(run_steps, *models[name], *setting))
        print(row(name, *speeds, *memory))


def memory_cells(memory: "Memory") -> list[str]:
    """The last columns of one contender.

    Args:
        memory: Of its process, with the bytes of weights, gradients and Adam as the result.
    """
    state = memory.result
    return megabytes((memory.growth - state, memory.peak, memory.start, state))


if __name__ == "__main__":
    sys.exit(main())
