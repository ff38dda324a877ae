#!/usr/bin/env python
r"""Training here and in other toolkits: speed, memory, minutes to a BLEU, lines of configuration.

All train on the same pieces of words: a model of the preset `tiny`, with the same number of pairs
in an update (on average: ours have a budget of tokens), learning rates, label smoothing, dropout of
the residual connections, Adam and norm of gradients. Biases and initial values are those of each
toolkit. What a user writes for each is in benchmarks/peers/; its lines are counted without empty
ones and comments. Products are in float32, and in vanilla-bf16 in bfloat16.

Speed: each trains on the first --pairs for an epoch that does not count and for one that does, in a
process of its own, whose start does not count. Tokens are those of both sides, with the ends of
sentences and without padding. Memory is the peak of the process, its children included.

With --until_bleu, each trains on all pairs, one toolkit after another, until its greedy
translations of the validation pairs have this BLEU, which is measured in the same way for all every
--save_every updates. Minutes count from the start of the process; while a checkpoint is translated,
training is halted, and so is the clock.

Examples:
  python benchmarks/peers.py --data multi30k_tok --environments joeynmt=JOEY/bin/python \
      eole=EOLE/bin/python
  python benchmarks/peers.py --data multi30k_tok --until_bleu 35 --toolkits vanilla m2m100
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lab import Report, benchmark_parser, megabytes, speed_cells, take_turns

if TYPE_CHECKING:
    from peers_toolkits import Job, Text

SPEED = ("toolkit", "tokens/s", "range", "speed", "memory, MB", "lines")
TIME = ("toolkit", "minutes", "updates", "BLEU", "memory, MB", "lines")
FAILED = ("failed", "-", "-", "-")
# Updates until a checkpoint that is never reached.
_FAR = 10**9
# Reports from one checkpoint to the next, which is scored at one of them.
_REPORTS = 10

Result = TypeVar("Result")


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = benchmark_parser(__doc__, rounds=2)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the files.")
    for name, stem in (("train", "train"), ("validation", "val")):
        files = [f"{stem}.lc.norm.tok.{side}.gz" for side in ("en", "de")]
        text = "Source and target, blanks between tokens."
        parser.add_argument(f"--{name}", nargs=2, default=files, help=text)
    environments = {"nargs": "*", "default": [], "metavar": "NAME=PYTHON"}
    parser.add_argument("--environments", **environments, help="Toolkits that have their own.")
    parser.add_argument("--toolkits", nargs="+", help="Default: all that have an environment.")
    parser.add_argument("--vocab_size", type=int, default=10_000, help="Default: 10000.")
    parser.add_argument("--tokens", type=int, default=4096, help="Of a batch, both sides (4096).")
    parser.add_argument("--pairs", type=int, default=2000, help="For speed (default: 2000).")
    parser.add_argument("--until_bleu", type=float, help="Measure the minutes to it instead.")
    updates = f"Updates, a multiple of {_REPORTS} (default: 200)."
    parser.add_argument("--save_every", type=int, default=200, help=updates)
    parser.add_argument("--limit", type=float, default=60.0, help="Most minutes (default: 60).")
    return parser.parse_args()


def main() -> int:
    """Prints one table; returns the exit status."""
    options = parse()
    # Imported late: it loads torch, and `--help` should answer at once.
    from peers_toolkits import TOOLKITS, Text

    own = dict(entry.split("=", 1) for entry in options.environments if "=" in entry)
    pythons = {
        name: own.get(name, sys.executable)
        for name, toolkit in TOOLKITS.items()
        if name in own or not toolkit.environment
    }
    chosen = options.toolkits or list(pythons)
    fault = ""
    if unknown := [name for name in chosen if name not in pythons]:
        fault = (
            f"--toolkits must be of {', '.join(pythons)}, got {', '.join(unknown)}. For one of "
            f"{', '.join(TOOLKITS)} in an environment of its own, name it: --environments "
            f"{unknown[0]}=PYTHON."
        )
    elif options.save_every < 1 or options.save_every % _REPORTS:
        fault = f"--save_every must be a multiple of {_REPORTS}, got {options.save_every}."
    if fault:
        print(fault, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        text = Text.prepare(
            Path(folder),
            *[
                [str(options.data / f) for f in files]
                for files in (options.train, options.validation)
            ],
            vocab_size=options.vocab_size,
            max_tokens=options.tokens,
            max_pairs=None if options.until_bleu else options.pairs,
        )
        compare = minutes_table if options.until_bleu else speed_table
        compare(Report(options.output), text, {name: pythons[name] for name in chosen}, options)
    return 0


def describe(text: "Text") -> str:
    """Pairs, tokens and updates of an epoch."""
    pairs, tokens = len(text.lengths), int(text.lengths.sum())
    updates = text.updates[False]
    return f"{pairs:,} pairs, {tokens:,} tokens, {updates:,} updates of {tokens / updates:,.0f}"


def speed_table(
    report: Report, text: "Text", pythons: dict[str, str], options: argparse.Namespace
) -> None:
    """Trains the toolkits in turn."""
    from peers_toolkits import TOOLKITS, Job

    runs = count()

    def run(name: str) -> tuple[float, int]:
        toolkit, folder = TOOLKITS[name], text.folder / f"run-{next(runs)}"
        # A report for each epoch.
        updates = text.updates[toolkit.batches_by_tokens]
        return Job(toolkit, pythons[name], text, folder, updates, _FAR).second_report()

    contenders = {name: partial(attempt, name, partial(run, name)) for name in pythons}
    measured = take_turns(contenders, options.rounds, where="peers")
    finished = {name: [one for one in found if one] for name, found in measured.items()}
    report.table(describe(text), *SPEED)
    for name, cells in speed_rows(int(text.lengths.sum()), finished).items():
        report.row(name, *cells, TOOLKITS[name].lines())


def attempt(name: str, run: Callable[[], Result]) -> Result | None:
    """The result of a run; None, and a message, if the toolkit fails."""
    try:
        return run()
    except RuntimeError as error:
        print(f"{name} failed. {error}", file=sys.stderr)
        return None


def speed_rows(
    tokens: int, measured: dict[str, list[tuple[float, int]]]
) -> dict[str, list[str] | tuple[str, ...]]:
    """The row of each toolkit; speeds are compared with the first that did not fail.

    Args:
        tokens: Tokens of an epoch.
        measured: Seconds of an epoch and the peak of memory, for each round.
    """
    seconds = {name: [s for s, _ in rounds] for name, rounds in measured.items() if rounds}
    cells = {}
    for name, rounds in measured.items():
        cells[name] = FAILED
        if rounds:
            speeds = speed_cells(tokens, seconds[name], next(iter(seconds.values())))
            cells[name] = [*speeds, *megabytes(max(peak for _, peak in rounds))]
    return cells


def minutes_table(
    report: Report, text: "Text", pythons: dict[str, str], options: argparse.Namespace
) -> None:
    """Trains one toolkit after another to the BLEU."""
    from peers_toolkits import TOOLKITS, Job

    report.table(describe(text), *TIME)
    for name, python in pythons.items():
        toolkit, steps = TOOLKITS[name], options.save_every
        job = Job(toolkit, python, text, text.folder / name, steps // _REPORTS, steps)
        cells = attempt(name, partial(minutes_cells, job, options.until_bleu, options.limit))
        report.row(name, *(cells or FAILED), toolkit.lines())


def minutes_cells(job: "Job", goal: float, limit: float) -> list[str]:
    """Minutes, updates, BLEU and memory at the goal; the best BLEU if the limit comes first."""
    best = 0.0
    for minutes, updates, bleu, peak in job.scores():
        print(f"{minutes:.1f} minutes, {updates:,} updates: BLEU {bleu:.1f}", file=sys.stderr)
        best = max(best, bleu)
        if bleu >= goal or minutes >= limit:
            reached = f"{minutes:.1f}" if bleu >= goal else f"more than {minutes:.1f}"
            return [reached, f"{updates:,}", f"{best:.1f}", *megabytes(peak)]
    raise AssertionError("`scores` has no end")


if __name__ == "__main__":
    sys.exit(main())
