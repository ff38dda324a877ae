#!/usr/bin/env python
"""How a training run grows with its corpus: time to the first update, and memory.

For each number of pairs, made at random, 27 words a side, three runs of the command follow one
another, each in a process of its own: the first one learns a vocabulary and tokenises the corpus,
the second one finds both in the cache, and the third one resumes the second. Seconds count from the
start of the process to the end of its first update, imports included; CPU seconds, in brackets, are
those of all its threads. Memory is the most that the first run has held until then, and in brackets
what of it is not mapped from files.

Example:
  python benchmarks/growth.py --sizes 10000 100000 1000000 --picture growth.svg
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback, trainer

from figures import new_figure, save_figure
from lab import Report, benchmark_parser, process_memory
from vanilla_transformer_tools.commands.train import train

RUNS = ("first", "cached", "resumed")
COLUMNS = ("pairs", "first update, s", "memory, GB", "from the cache, s", "resumed, s")
COLUMNS += ("checkpoint, s",)
WORDS, VOCABULARY, LINES_AT_A_TIME = 27, 50_000, 10_000
SECONDS_BETWEEN_LOOKS = 0.05
MARK = "growth: "


def main() -> None:
    """Prints a table, a row after the runs of a size, and draws the seconds."""
    parser = benchmark_parser(__doc__, sizes=(10_000, 100_000, 1_000_000))
    parser.add_argument("--streaming", action="store_true", help="Read pairs while training.")
    parser.add_argument("--folder", type=Path, help="Room for 1.5 KB a pair (default: TMPDIR).")
    parser.add_argument("--picture", type=Path, help="Picture of the rows, .svg or .png.")
    options = parser.parse_args()
    rows, report = [], Report(options.output)
    report.table(f"Streaming: {options.streaming}", *COLUMNS)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for pairs in sorted(options.sizes):
            rows.append(measure(pairs, Path(folder), options.streaming))
            report.row(*cells(rows[-1]))
    if options.picture:
        draw(rows, options.picture)


def measure(pairs: int, folder: Path, is_streaming: bool) -> dict[str, float]:
    """Pairs, and what the three runs have reported; the corpus is deleted."""
    corpus = [folder / "train.source", folder / "train.target"]
    for seed, path in enumerate(corpus):
        with path.open("w", encoding="utf-8") as file:
            file.writelines(made_lines(pairs, seed))
    argv = ["--train", *map(str, corpus), "--preset", "tiny", "--disable_tqdm", "true"]
    argv += ["--vocab_size", "8000", "--save_strategy", "steps", "--save_steps", "1"]
    argv += [*["--streaming"] * is_streaming, "--max_steps"]
    cache, again = folder / f"cache-{pairs}", folder / f"again-{pairs}"
    reports = (
        run([*argv, "1"], folder / f"first-{pairs}", cache),
        run([*argv, "1"], again, cache),
        run([*argv, "2", "--resume"], again, cache),
    )
    for path in corpus:
        path.unlink()
    shutil.rmtree(cache, ignore_errors=True)
    named = zip(RUNS, reports, strict=True)
    return {"pairs": pairs} | {f"{name} {key}": r[key] for name, r in named for key in r}


def cells(measured: dict[str, float]) -> list[str]:
    """A row of the table; CPU seconds are in brackets."""
    first, cached, resumed = (
        f"{measured[f'{name} seconds']:.1f} ({measured[f'{name} cpu']:.1f})" for name in RUNS
    )
    memory = f"{measured['first peak'] / 1e9:.2f} ({measured['first unmapped'] / 1e9:.2f})"
    saved = f"{measured['first checkpoint']:.1f}"
    return [f"{measured['pairs']:,.0f}", first, memory, cached, resumed, saved]


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Seconds and memory over pairs; pairs and seconds are logarithmic."""
    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    pairs = [measured["pairs"] for measured in rows]
    for name, label in (
        ("first seconds", "first run"),
        ("cached seconds", "from the cache"),
        ("resumed seconds", "resumed"),
        ("first checkpoint", "a checkpoint"),
    ):
        left.loglog(pairs, [measured[name] for measured in rows], "o-", label=label)
    left.set(xlabel="pairs", ylabel="seconds")
    for name, label in (("first peak", "all"), ("first unmapped", "not mapped from files")):
        right.semilogx(pairs, [measured[name] / 1e9 for measured in rows], "o-", label=label)
    right.set(xlabel="pairs", ylabel="memory, GB", ylim=(0, None))
    left.legend()
    right.legend()
    save_figure(figure, path)


def made_lines(pairs: int, seed: int) -> Iterator[str]:
    """Lines of `WORDS` words on average; the word of rank r has a frequency of 1 / (r + 10)."""
    rng = np.random.default_rng(seed)
    syllables = np.array([first + second for first in "bdfgklmnprstvwz" for second in "aeiou"])
    drawn = rng.choice(syllables, (VOCABULARY, 4)).tolist()
    words = np.array(["".join(each[: rng.integers(1, 5)]) for each in drawn])
    shares = 1 / np.arange(10, VOCABULARY + 10)
    for first in range(0, pairs, LINES_AT_A_TIME):
        counts = rng.integers(1, 2 * WORDS, min(LINES_AT_A_TIME, pairs - first))
        following = iter(rng.choice(words, counts.sum(), p=shares / shares.sum()).tolist())
        for count in counts.tolist():
            yield " ".join(islice(following, count)) + "\n"


def run(argv: list[str], output: Path, cache: Path) -> dict[str, float]:
    """What a run of `train` in a new process has reported of its first update."""
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "TMPDIR": str(output.parent)}
    environment["GROWTH_STARTED"] = str(time.time())
    # Empty, it would turn the cache off.
    environment.pop("VANILLA_TRANSFORMER_CACHE", None)
    command = [sys.executable, __file__, "--run", *argv, "--output_dir", str(output)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            report |= json.loads(line.removeprefix(MARK))
    return report


def report_first_update(argv: list[str]) -> None:
    """Runs `train` and prints what its only update took."""
    unmapped = [0]

    def look() -> None:
        while True:
            unmapped[0] = max(unmapped[0], process_memory("RssAnon"))
            time.sleep(SECONDS_BETWEEN_LOOKS)

    threading.Thread(target=look, daemon=True).start()

    class FirstUpdate(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.updated = time.time()
            used = resource.getrusage(resource.RUSAGE_SELF)
            print_report(
                seconds=self.updated - float(os.environ["GROWTH_STARTED"]),
                cpu=used.ru_utime + used.ru_stime,
                peak=process_memory(),
                unmapped=unmapped[0],
            )

        def on_save(self, *_: Any, **__: Any) -> None:
            print_report(checkpoint=time.time() - self.updated)

    trainer.DEFAULT_CALLBACKS.append(FirstUpdate)
    train(argv)


def print_report(**values: float) -> None:
    """A line that `run` finds among the others."""
    print(f"{MARK}{json.dumps(values)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        report_first_update(sys.argv[2:])
    else:
        main()
