#!/usr/bin/env python
"""Training speed and memory against M2M100 and Marian of the same size, on identical batches.

All contenders take the same batches in turn, round after round; a round's time is that of
forward, backward and Adam, and the table shows the median. Memory is taken in a process of its
own for each contender. Tokens are counted without padding.

Example:
  python scripts/benchmark_training.py --corpus train.de.gz train.en.gz --presets tiny base
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

VOCABULARY = {"tiny": 10_000, "small": 32_000, "base": 32_000, "big": 37_000}


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--corpus", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--presets", nargs="+", default=["tiny", "base"], choices=VOCABULARY)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096, help="Tokens of a batch, both sides.")
    parser.add_argument("--rounds", type=int, default=5, help="Timed rounds (default: 5).")
    parser.add_argument("--batches", type=int, default=4, help="Batches of a round (default: 4).")
    parser.add_argument("--label_smoothing", type=float, default=0.0, help="(default: 0)")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Prints one table for each preset and dtype."""
    options = parse()
    if options.memory_of:
        import torch

        from neighbours import memory_of_steps

        family, file = options.memory_of
        print(json.dumps(memory_of_steps(family, *torch.load(file, weights_only=False))))
        return
    for preset in options.presets:
        for dtype in options.dtypes:
            options.preset, options.dtype = preset, dtype
            print_table(options)


def contest(options: argparse.Namespace) -> tuple:
    """Preset, vocabulary, dtype and batches, the same for all contenders."""
    from neighbours import batches

    vocab_size = VOCABULARY[options.preset]
    cut = batches(options.corpus, vocab_size, options.tokens, options.batches)
    return options.preset, vocab_size, options.dtype, options.label_smoothing, cut


def print_table(options: argparse.Namespace) -> None:
    """Times the contenders side by side and asks a process of each for its memory."""
    from neighbours import FAMILIES, hardware_line, time_rounds, tokens_of

    setting = contest(options)
    seconds = time_rounds(setting, options.rounds)
    tokens = tokens_of(setting[-1])
    print(
        f"\n{options.preset}, {options.dtype}, vocabulary {VOCABULARY[options.preset]:,}, "
        f"{tokens:,} tokens in {options.batches} batches; {hardware_line()}"
    )
    print("| model | tokens/s | range | growth MB | peak MB | start MB | weights+grads+Adam MB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family in FAMILIES:
        speeds = [tokens / second for second in seconds[family]]
        memory = memory_in_process(family, setting)
        print(
            f"| {family} | {statistics.median(speeds):,.0f} | "
            f"{min(speeds):,.0f}-{max(speeds):,.0f} | "
            + " | ".join(f"{memory[key]:,.0f}" for key in ("growth", "peak", "start", "state"))
            + " |"
        )


def memory_in_process(family: str, setting: tuple) -> dict[str, float]:
    """Runs this script once more, for the memory of one contender that finds its batches made."""
    import torch

    with tempfile.NamedTemporaryFile() as file:
        torch.save(setting, file.name)
        command = [sys.executable, __file__, "--memory-of", family, file.name, "--corpus", "", ""]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
