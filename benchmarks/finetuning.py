#!/usr/bin/env python
r"""Fine-tuning in this package against the class that the weights come from.

Both models have the same random weights and run under the same `Seq2SeqTrainer` on the same batches
of random pairs, in float32. Two tables for each size:

- Speed, in rounds that take turns, and the memory of an update beyond weights, gradients and Adam,
  each in a process of its own; with the dropout of the class's config.
- The losses of the first updates without dropout, each batch at once and accumulated in four parts.

Sizes: opus, MarianMT as OPUS-MT has it; nllb, NLLB-200 600M with 2+2 of its 12+12 layers, which
needs some 14 GB for both models together; minute, M2M100 with two layers of 32, for a quick look.

Examples:
  python benchmarks/finetuning.py --sizes opus nllb
  python benchmarks/finetuning.py --sizes minute --rounds 1 --updates 3
"""

import argparse
import gc
import sys
from typing import TYPE_CHECKING

from ratio_tables import head, megabytes, rate, rate_range, ratio, row

if TYPE_CHECKING:
    from finetuning_contenders import Losses
    from memory import Memory

SPEED = ("model", "tokens/s", "range", "speed", "growth MB", "memory", "state MB")
LOSSES = ("model", "parts", "first loss", "last loss", "largest gap", "gradient norm", "times")


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--sizes", nargs="+", default=["opus", "nllb"], help="(default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=16, help="Pairs of a batch (default: 16).")
    parser.add_argument("--rounds", type=int, default=5, help="Timed rounds (default: 5).")
    parser.add_argument("--batches", type=int, default=2, help="Updates of a round (default: 2).")
    parser.add_argument("--updates", type=int, default=20, help="Compared losses (default: 20).")
    return parser.parse_args()


def main() -> int:
    """Prints two tables for each size; returns the exit status."""
    options = parse()
    # Imported late: it loads torch, and `--help` should answer at once.
    from finetuning_contenders import SIZES

    if unknown := [size for size in options.sizes if size not in SIZES]:
        print(f"--sizes must be of {', '.join(SIZES)}, got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    for size in options.sizes:
        print_speeds(size, options)
        print_losses(size, options)
    return 0


def print_speeds(size: str, options: argparse.Namespace) -> None:
    """Times the contenders in turn, and measures the memory of each in a process of its own."""
    from finetuning_contenders import KINDS, Contender, describe, random_pairs, run_round, tokens_of
    from memory import measure_alone
    from rounds import take_turns

    pairs = random_pairs(size, options.pairs * options.batches)
    contenders = {kind: Contender(size, kind, pairs, options.pairs).run for kind in KINDS}
    seconds = take_turns(contenders, options.rounds, warm_ups=1, where=size)
    # Their memory is needed for the processes; trainers refer to themselves.
    contenders.clear()
    gc.collect()
    memory = {kind: measure_alone(run_round, size, kind, pairs, options.pairs) for kind in KINDS}
    print(f"\n{size}, {describe(size)}; {options.pairs} pairs, {tokens_of(pairs):,} tokens a round")
    print(head(*SPEED))
    for kind, cells in speed_cells(tokens_of(pairs), seconds, memory).items():
        print(row(kind, *cells), flush=True)


def speed_cells(
    tokens: int, seconds: dict[str, list[float]], memory: dict[str, "Memory"]
) -> dict[str, list[str]]:
    """The row of each contender; ratios are to the first.

    Args:
        tokens: Of a round, padding not counted.
        seconds: Of the rounds of each.
        memory: Of each, with the bytes of weights, gradients and Adam as the result.
    """
    reference = next(iter(seconds.values()))
    growths = {kind: used.growth - used.result for kind, used in memory.items()}
    first_growth = next(iter(growths.values()))
    cells = {}
    for kind, times in seconds.items():
        growth, state = megabytes((growths[kind], memory[kind].result))
        speeds = [rate(tokens, times), rate_range(tokens, times), ratio(reference, times)]
        cells[kind] = [*speeds, growth, f"{growths[kind] / first_growth:.2f}", state]
    return cells


def print_losses(size: str, options: argparse.Namespace) -> None:
    """Trains each contender on the same pairs, at once and accumulated."""
    from finetuning_contenders import KINDS, losses_of, random_pairs

    pairs = random_pairs(size, options.pairs * options.updates)
    print(f"\n{size}, losses of {options.updates} updates\n{head(*LOSSES)}")
    first = None
    for parts in (1, 4):
        for kind in KINDS:
            found = losses_of(size, kind, pairs, options.pairs, parts)
            first = first or found
            print(row(kind, parts, *loss_cells(found, first)), flush=True)


def loss_cells(found: "Losses", first: "Losses") -> list[str]:
    """The row of one run, compared with the first."""
    gaps = [abs(ours - theirs) for ours, theirs in zip(found.losses, first.losses, strict=True)]
    norms = (f"{found.norms[0]:.3f}", f"{found.norms[0] / first.norms[0]:.3f}")
    return [f"{found.losses[0]:.4f}", f"{found.losses[-1]:.4f}", f"{max(gaps):.1e}", *norms]


if __name__ == "__main__":
    sys.exit(main())
