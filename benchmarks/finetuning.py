#!/usr/bin/env python
r"""Fine-tuning in this package against the class that the weights come from.

Both models have the same random weights and train on the same random pairs, in float32, with the
dropout of the class's config. The speed is relative to the class of Transformers, and so is the
memory of an update beyond weights, gradients and Adam, each measured in a process of its own.

Sizes: opus, MarianMT as OPUS-MT has it; nllb, NLLB-200 600M with 2+2 of its 12+12 layers, which
needs some 14 GB for both models together; nllb-kept, the same with a trimmed vocabulary; minute,
M2M100 with two layers of 32, for a quick look.

Example:
  python benchmarks/finetuning.py --sizes opus nllb
"""

from lab import Memory, Report, benchmark_parser, megabytes, speed_cells, take_turns

COLUMNS = ("model", "tokens/s", "range", "speed", "growth MB", "memory", "state MB")
# The class itself, and what it becomes here.
KINDS = ("in-tree", "vanilla")
SIZES = ("opus", "nllb", "nllb-kept", "minute")


def main() -> None:
    """Prints a table for each size."""
    parser = benchmark_parser(__doc__, sizes=("opus", "nllb"), known=SIZES, rounds=5)
    parser.add_argument("--pairs", type=int, default=16, help="Pairs of a batch (default: 16).")
    parser.add_argument("--batches", type=int, default=2, help="Updates of a round (default: 2).")
    options = parser.parse_args()
    report = Report(options.output)
    for size in options.sizes:
        compare(report, size, options.pairs, options.batches, options.rounds)


def compare(report: Report, size: str, pairs: int, batches: int, rounds: int) -> None:
    """Adds the table of a size."""
    # Imported late: it loads torch, and `--help` should answer at once.
    from finetuning_contenders import contender
    from neighbours import steps_alone, tokens_of

    contenders = {kind: contender(size, kind, pairs, batches) for kind in KINDS}
    tokens = tokens_of(contenders[KINDS[0]].cut)
    runs = {kind: each.run for kind, each in contenders.items()}
    seconds = take_turns(runs, rounds, warm_ups=1, where=size)
    # Their memory is needed for the processes.
    contenders.clear()
    runs.clear()
    memory = {kind: steps_alone(contender, size, kind, pairs, batches) for kind in KINDS}
    report.table(f"{size}, float32, {pairs} pairs, {tokens:,} tokens a round", *COLUMNS)
    for kind, cells in rows(tokens, seconds, memory).items():
        report.row(kind, *cells)


def rows(
    tokens: int, seconds: dict[str, list[float]], memory: dict[str, Memory]
) -> dict[str, list[str]]:
    """The cells of each contender; ratios are to the first.

    Args:
        tokens: Tokens of a round, padding not counted.
        seconds: Seconds of the rounds of each.
        memory: Memory of each, with the bytes of weights, gradients and Adam as the result.
    """
    first = KINDS[0]
    growths = {kind: used.growth - used.result for kind, used in memory.items()}
    cells = {}
    for kind, times in seconds.items():
        growth, state = megabytes(growths[kind], memory[kind].result)
        relative = f"{growths[kind] / growths[first]:.2f}"
        cells[kind] = [*speed_cells(tokens, times, seconds[first]), growth, relative, state]
    return cells


if __name__ == "__main__":
    main()
