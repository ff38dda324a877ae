#!/usr/bin/env python
r"""BLEU after some minutes of training: this package by `train --minutes`, and other toolkits.

All train on the same text, one after another, and translate the validation sources greedily.
Minutes are those of the whole process, from its start. This package reads words and learns its
vocabulary within the minutes, once for each number of minutes and each seed. The others read pieces
of words that are there, and are those of benchmarks/peers.py: each trains once for each learning
rate up to the most minutes, and the clock is halted while a checkpoint is translated. At a number
of minutes they have the BLEU of their last checkpoint until then, with the better rate; without a
checkpoint they have none. With --points, a file notes the runs, and those in it are not repeated.

Example:
  OMP_NUM_THREADS=1 python benchmarks/minutes.py --data multi30k_tok --minutes 1 2 5 15 30 60 \
      --seeds 1 2 3 --toolkits m2m100 marian --environments marian=MARIAN/bin/python \
      --picture minutes.svg
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from sacrebleu.metrics import BLEU

from figures import new_figure, save_figure
from lab import Report, benchmark_parser
from peers import (
    FAILED,
    REPORT,
    TOOLKITS,
    TRAIN,
    VALIDATION,
    Job,
    Text,
    add_toolkits,
    attempt,
    prepare,
    pythons_of,
)
from vanilla_transformer_tools.files import read_lines

OURS = "vanilla_transformer"
# Minutes of a process, and the BLEU of what it had trained.
Point = tuple[float, float]


def point_of_ours(text: Text, data: Path, minutes: float, seed: int) -> list[Point]:
    """Trains by `--minutes` alone, and scores the result."""
    run, output = (text.folder / f"{minutes:g}-{seed}{end}" for end in ("", ".txt"))
    (train, validation) = ([str(data / name) for name in names] for names in (TRAIN, VALIDATION))
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands"]
    options = ["--minutes", f"{minutes:g}", "--seed", str(seed), "--pretokenized"]
    options += ["--bleu_tokenize", "none", "--output_dir", str(run)]
    started = time.perf_counter()
    trained = [*command, "train", "--train", *train, "--validation", *validation, *options]
    subprocess.run(trained, stdout=sys.stderr, check=True)
    taken = (time.perf_counter() - started) / 60
    files = ["--input", validation[0], "--output", str(output)]
    subprocess.run([*command, "translate", "--model", run, "--num_beams", "1", *files], check=True)
    bleu = BLEU(tokenize="none", force=True)
    score = bleu.corpus_score(list(read_lines(output)), [text.references]).score
    return [(taken, score)]


def noted(file: Path | None, run: str, measure: Callable[[], list[Point]]) -> list[Point]:
    """Points of a run: those in the file, or measured now and added to it."""
    lines = file.read_text(encoding="utf-8").split("\n") if file and file.exists() else []
    known = dict(json.loads(line) for line in lines if line)
    if run in known:
        return [tuple(point) for point in known[run]]
    points = attempt(run, measure)
    if file and points is not None:
        with file.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps([run, points]) + "\n")
    return points or []


def points_of(job: Job, most: float) -> list[Point]:
    """Those of the checkpoints of another toolkit, until so many minutes."""
    points: list[Point] = []
    with closing(job.scores()) as scores:
        for minutes, updates, bleu, _ in scores:
            print(f"{minutes:.1f} minutes, {updates:,} updates: BLEU {bleu:.1f}", file=sys.stderr)
            if minutes > most:
                break
            points.append((minutes, bleu))
    return points


def span(points: Sequence[Point]) -> str:
    """The lowest and the highest BLEU of the seeds."""
    scores = [bleu for _, bleu in points]
    return f"{min(scores):.1f} to {max(scores):.1f}" if scores else "-"


def at(minutes: float, curves: Sequence[Sequence[Point]]) -> str:
    """The best of the last BLEUs until so many minutes."""
    last = [max(until)[1] for curve in curves if (until := [p for p in curve if p[0] <= minutes])]
    return f"{max(last):.1f}" if last else "-"


def draw(curves: dict[str, list[list[Point]]], minutes: Sequence[float], path: Path) -> None:
    """Draws points of ours, and a line for each toolkit and rate."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for color, (name, lines) in enumerate(curves.items()):
        style = "o" if name == OURS else ".-"
        for line in filter(None, lines):
            axes.plot(*zip(*line, strict=True), style, color=f"C{color}", label=name)
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(named.values(), named.keys())
    axes.set(xscale="log", xlabel="minutes of training", ylabel="BLEU")
    axes.set_xticks(minutes, [f"{each:g}" for each in minutes])
    axes.minorticks_off()
    save_figure(figure, path)


def main() -> int:
    """Prints one table, and draws it; returns the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the files.")
    minutes = {"nargs": "+", "type": float, "default": [1.0, 2.0, 5.0, 15.0, 30.0, 60.0]}
    parser.add_argument("--minutes", **minutes, help="Default: 1 2 5 15 30 60.")
    seeds = {"nargs": "+", "type": int, "default": [1, 2, 3]}
    parser.add_argument("--seeds", **seeds, help="For this package; default: 1 2 3.")
    rates = {"nargs": "+", "type": float, "default": [0.002, 0.004]}
    parser.add_argument("--rates", **rates, help="For the others; default: 0.002 0.004.")
    parser.add_argument("--save", type=int, default=100, help="Updates between checkpoints (100).")
    parser.add_argument("--points", type=Path, help="File of the runs' points, JSON lines.")
    parser.add_argument("--picture", type=Path, help="File of the picture, .svg or .png.")
    add_toolkits(parser)
    options = parser.parse_args()
    if options.save < REPORT or options.save % REPORT:
        parser.error(f"--save must be a multiple of {REPORT}, got {options.save}")
    pythons = pythons_of(parser, options)
    with tempfile.TemporaryDirectory() as folder:
        files = ([options.data / name for name in names] for names in (TRAIN, VALIDATION))
        text = prepare(Path(folder), *files, None)
        report = Report(options.output)
        note = f"{len(text.lengths):,} pairs, seeds {', '.join(map(str, options.seeds))}"
        report.table(note, "BLEU after minutes", *(f"{each:g}" for each in options.minutes))
        curves: dict[str, list[list[Point]]] = {OURS: []}
        for each in options.minutes:
            curves[OURS].append([])
            for seed in options.seeds:
                run = partial(point_of_ours, text, options.data, each, seed)
                curves[OURS][-1] += noted(options.points, f"{OURS} {each:g} {seed}", run)
        report.row(OURS, *map(span, curves[OURS]))
        for name in (name for name in pythons if not name.startswith("vanilla")):
            curves[name] = []
            for rate in options.rates:
                run = text.folder / f"{name}-{rate}"
                job = Job(TOOLKITS[name], pythons[name], text, run, REPORT, options.save, rate)
                measure = partial(points_of, job, max(options.minutes))
                curves[name].append(noted(options.points, f"{name} {rate:g}", measure))
            report.row(name, *(at(each, curves[name]) for each in options.minutes))
    if options.picture:
        draw(curves, options.minutes, options.picture)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
