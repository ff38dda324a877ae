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
"""

import argparse
import fnmatch
import multiprocessing
import statistics
import sys

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
    from neighbours import batches, hardware_line, padding_of, time_rounds, tokens_of

    vocab_size = VOCABULARY[preset]
    size = (options.tokens, options.batches, options.unsorted)
    cut = batches(options.corpus, vocab_size, *size)
    setting = (preset, vocab_size, dtype, options.label_smoothing, options.compile, cut)
    seconds = time_rounds(models, setting, options.rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first, *_ = medians.values()
    tokens = tokens_of(cut)
    print(
        f"\n{preset}, {dtype}, vocabulary {vocab_size:,}, "
        f"{tokens:,} tokens in {options.batches} batches, {100 * padding_of(cut):.1f} % padding; "
        f"{hardware_line()}"
        f"{', compiled' if options.compile else ''}"
    )
    print("| model | tokens/s | range | time | growth MB | peak MB | start MB | state MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, times in seconds.items():
        memory = memory_in_process(*models[name], *setting)
        print(
            f"| {name} | {tokens / medians[name]:,.0f} | {tokens / max(times):,.0f}-"
            f"{tokens / min(times):,.0f} | {medians[name] / first:.2f} | "
            + " | ".join(f"{memory[key]:,.0f}" for key in ("growth", "peak", "start", "state"))
            + " |"
        )


def memory_in_process(*setting: object) -> dict[str, float]:
    """Memory of one contender in a fresh process, which gets its batches ready-made."""
    from neighbours import memory_of_steps

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(memory_of_steps, setting)


if __name__ == "__main__":
    sys.exit(main())
