#!/usr/bin/env python
r"""Training here and in other toolkits: speed, memory, minutes to a BLEU, lines of configuration.

All train on the same pieces of words: a model of the preset `tiny`, with the same number of pairs
in an update (on average: ours have a budget of tokens), learning rates, label smoothing, dropout of
the residual connections, Adam and norm of gradients. Biases and initial values are those of each
toolkit. What a user writes for each is in benchmarks/peers/; empty lines and comments do not count,
nor does cutting words into pieces. Matrix products are in float32, and in vanilla-bf16 in bfloat16,
our default where that is faster.

Speed: in rounds that take turns, each trains on the first --pairs for an epoch that does not count
and --epochs that do, in a process of its own, which start-up does not count for. Tokens are those
of both sides, with the ends of sentences and without padding. Memory is the peak of the process,
its children included.

With --until_bleu, each trains on all pairs, one toolkit after another, until its greedy
translations of the validation pairs have this BLEU, which is measured here in the same way for all,
every --save_every updates. Minutes count from the start of the process, with imports, reading and
saving; while a checkpoint is translated, training is halted, and so is the clock.

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

from ratio_tables import head, megabytes, rate, rate_range, ratio, row

if TYPE_CHECKING:
    from peers_toolkits import Job, Text

SPEED = ("toolkit", "tokens/s", "range", "speed", "memory, MB", "lines")
TIME = ("toolkit", "minutes", "updates", "BLEU", "memory, MB", "lines")
# Updates without end.
_MANY = 1_000_000
# Reports from one checkpoint to the next, which is scored at one of them.
_REPORTS = 10

Result = TypeVar("Result")


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the files.")
    for name, stem in (("train", "train"), ("validation", "val")):
        files = [f"{stem}.lc.norm.tok.{side}.gz" for side in ("en", "de")]
        parser.add_argument(
            f"--{name}", nargs=2, default=files, help="Source and target, blanks between tokens."
        )
    parser.add_argument(
        "--environments", nargs="*", default=[], help="NAME=PYTHON of each toolkit that has one."
    )
    parser.add_argument("--toolkits", nargs="+", help="Default: all that have an environment.")
    parser.add_argument("--vocab_size", type=int, default=10_000, help="Default: 10000.")
    parser.add_argument("--tokens", type=int, default=4096, help="Of a batch, both sides (4096).")
    parser.add_argument("--pairs", type=int, default=2000, help="For speed (default: 2000).")
    parser.add_argument("--epochs", type=int, default=1, help="Timed in a round (default: 1).")
    parser.add_argument("--rounds", type=int, default=2, help="Default: 2.")
    parser.add_argument("--until_bleu", type=float, help="Measure the minutes to it instead.")
    parser.add_argument(
        "--save_every",
        type=int,
        default=200,
        help=f"Updates, a multiple of {_REPORTS} (default: 200).",
    )
    parser.add_argument("--limit", type=float, default=60.0, help="Most minutes (default: 60).")
    return parser.parse_args()


def main() -> int:
    """Prints one table; returns the exit status."""
    options = parse()
    # Imported late: it loads torch, and `--help` should answer at once.
    from neighbours import hardware_line
    from peers_toolkits import TOOLKITS, Text

    own = dict(entry.split("=", 1) for entry in options.environments if "=" in entry)
    pythons = {
        name: own.get(name, sys.executable)
        for name, toolkit in TOOLKITS.items()
        if name in own or not toolkit.environment
    }
    chosen = options.toolkits or list(pythons)
    if unknown := [name for name in chosen if name not in pythons]:
        print(
            f"--toolkits must be of {', '.join(pythons)}, got {', '.join(unknown)}. For one of "
            f"{', '.join(TOOLKITS)} in an environment of its own, name it: --environments "
            f"{unknown[0]}=PYTHON.",
            file=sys.stderr,
        )
        return 2
    if options.save_every < 1 or options.save_every % _REPORTS:
        print(
            f"--save_every must be a multiple of {_REPORTS}, as there are {_REPORTS} reports from "
            f"one checkpoint to the next, got {options.save_every}.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = Text.prepare(
            folder,
            tuple(str(options.data / file) for file in options.train),
            tuple(str(options.data / file) for file in options.validation),
            vocab_size=options.vocab_size,
            max_tokens=options.tokens,
            max_pairs=None if options.until_bleu else options.pairs,
        )
        print(f"{describe(text)}; {hardware_line()}")
        chosen_pythons = {name: pythons[name] for name in chosen}
        if options.until_bleu:
            print_minutes(text, chosen_pythons, options)
        else:
            print_speeds(text, chosen_pythons, options)
    return 0


def describe(text: "Text") -> str:
    """Pairs, tokens and updates of an epoch."""
    pairs, tokens = len(text.lengths), int(text.lengths.sum())
    updates = text.updates[False]
    return f"{pairs:,} pairs, {tokens:,} tokens, {updates:,} updates of {tokens / updates:,.0f}"


def print_speeds(text: "Text", pythons: dict[str, str], options: argparse.Namespace) -> None:
    """Trains the toolkits in turn."""
    from rounds import take_turns

    from peers_toolkits import TOOLKITS, Job

    runs = count()

    def run(name: str) -> tuple[list[float], int]:
        toolkit = TOOLKITS[name]
        updates = text.updates[toolkit.batches_by_tokens]
        folder = text.folder / f"run-{next(runs)}"
        job = Job(toolkit, pythons[name], text, folder, _MANY * updates, updates, _MANY * updates)
        return job.epoch_seconds(options.epochs)

    contenders = {name: partial(attempt, name, partial(run, name)) for name in pythons}
    measured = take_turns(contenders, options.rounds, where="peers")
    finished = {name: [one for one in found if one] for name, found in measured.items()}
    print(head(*SPEED))
    for name, cells in speed_cells(int(text.lengths.sum()), finished).items():
        print(row(name, *cells, TOOLKITS[name].lines()))


def attempt(name: str, run: Callable[[], Result]) -> Result | None:
    """The result of a run; None, and a message, if the toolkit fails."""
    try:
        return run()
    except RuntimeError as error:
        print(f"{name} failed. {error}", file=sys.stderr)
        return None


def speed_cells(
    tokens: int, measured: dict[str, list[tuple[list[float], int]]]
) -> dict[str, list[str]]:
    """The row of each toolkit; speeds are compared with the first.

    Args:
        tokens: Of an epoch.
        measured: Seconds of the epochs of each round, and the peak of memory.
    """
    seconds = {name: [s for times, _ in rounds for s in times] for name, rounds in measured.items()}
    reference = next(iter(seconds.values()))
    cells = {}
    for name, times in seconds.items():
        if not times:
            cells[name] = ["failed", *["-"] * 3]
            continue
        speeds = [rate(tokens, times), rate_range(tokens, times)]
        speeds.append(ratio(reference, times) if reference else "-")
        cells[name] = [*speeds, *megabytes([max(peak for _, peak in measured[name])])]
    return cells


def print_minutes(text: "Text", pythons: dict[str, str], options: argparse.Namespace) -> None:
    """Trains one toolkit after another to the BLEU."""
    from peers_toolkits import TOOLKITS, Job

    print(head(*TIME))
    for name, python in pythons.items():
        toolkit, folder = TOOLKITS[name], text.folder / name
        report = options.save_every // _REPORTS
        job = Job(toolkit, python, text, folder, _MANY, report, options.save_every)
        cells = attempt(name, partial(minutes_cells, job, options.until_bleu, options.limit))
        print(row(name, *(cells or ["failed", *["-"] * 3]), toolkit.lines()), flush=True)


def minutes_cells(job: "Job", goal: float, limit: float) -> list[str]:
    """Minutes, updates, BLEU and memory at the goal; the best BLEU if the limit comes first."""
    best = 0.0
    for minutes, updates, bleu, peak in job.scores():
        print(f"{minutes:.1f} minutes, {updates:,} updates: BLEU {bleu:.1f}", file=sys.stderr)
        best = max(best, bleu)
        if bleu >= goal or minutes >= limit:
            reached = f"{minutes:.1f}" if bleu >= goal else f"more than {minutes:.1f}"
            return [reached, f"{updates:,}", f"{best:.1f}", *megabytes([peak])]
    raise AssertionError("`scores` has no end")


if __name__ == "__main__":
    sys.exit(main())
