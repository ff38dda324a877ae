#!/usr/bin/env python
"""How a training run grows with its corpus: time to the first update, and memory.

For each number of pairs, made at random, 27 words a side, three runs of the command follow one
another, each in a process of its own: the first one learns a vocabulary and tokenises the corpus,
the second one finds both in the cache, and the third one resumes the second. Seconds count from the
start of the process to the end of its first update, imports included; those of a checkpoint are of
its saving. CPU seconds are those of all threads of the process until then, which other programs
hardly change. Memory is the most that the first run has held until then, and in brackets what of it
is not mapped from files, looked up twenty times a second.

Example:
  python benchmarks/growth.py --pairs 10000 100000 1000000 --output growth.svg
"""

import argparse
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

from memory import peak_memory
from ratio_tables import head, row

RUNS = ("first", "cached", "resumed")
COLUMNS = ("pairs", "first update, s", "memory, GB", "from the cache, s", "resumed, s")
COLUMNS = (*COLUMNS, "checkpoint, s")
WORDS = 27
_VOCABULARY = 50_000
_LINES_AT_A_TIME = 10_000
# Words are drawn from a list in which each occurs as often as it shall be drawn.
_DRAWN_FROM = 2**20
_SECONDS_BETWEEN_LOOKS = 0.05
_MARK = "growth: "


def main() -> None:
    """Prints a Markdown table, a row after the runs of a size, and draws the seconds."""
    if sys.argv[1:2] == ["--run"]:
        return report_first_update(sys.argv[2:])
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    sizes = [10_000, 100_000, 1_000_000]
    parser.add_argument("--pairs", type=int, nargs="+", default=sizes, help="(10000 ... 1000000)")
    parser.add_argument("--preset", default="tiny", help="Sizes of the model (default: tiny).")
    parser.add_argument("--vocab_size", type=int, default=8000, help="Default: 8000.")
    parser.add_argument("--streaming", action="store_true", help="Read pairs while training.")
    parser.add_argument("--folder", type=Path, help="Room for 1.5 KB a pair (default: TMPDIR).")
    parser.add_argument("--output", type=Path, help="Picture, .svg or .png (default: none).")
    options = parser.parse_args()
    rows = []
    print(head(*COLUMNS))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for pairs in sorted(options.pairs):
            rows.append(measure(pairs, Path(folder), options))
            print(row(*cells(rows[-1])), flush=True)
    if options.output:
        draw(rows, options.output)
    return None


def measure(pairs: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Pairs, and what the three runs have reported; the corpus is deleted."""
    corpus = [folder / "train.source", folder / "train.target"]
    for seed, path in enumerate(corpus):
        with path.open("w", encoding="utf-8") as file:
            file.writelines(made_lines(pairs, seed))
    argv = ["--train", *map(str, corpus), "--preset", options.preset, "--disable_tqdm", "true"]
    argv += ["--vocab_size", str(options.vocab_size), "--save_strategy", "steps"]
    argv += ["--save_steps", "1", *["--streaming"] * options.streaming, "--max_steps"]
    cache, again = folder / f"cache-{pairs}", folder / f"again-{pairs}"
    reports = (
        run([*argv, "1"], folder / f"first-{pairs}", cache),
        run([*argv, "1"], again, cache),
        run([*argv, "2", "--resume"], again, cache),
    )
    measured = {"pairs": pairs, "checkpoint": reports[0]["checkpoint"]}
    for name, report in zip(RUNS, reports, strict=True):
        measured |= {f"{name} {key}": value for key, value in report.items()}
    for path in corpus:
        path.unlink()
    shutil.rmtree(cache, ignore_errors=True)
    return measured


def cells(measured: dict[str, float]) -> Iterator[str]:
    """A row of the table; CPU seconds are in brackets."""
    first, cached, resumed = (
        f"{measured[f'{name} seconds']:.1f} ({measured[f'{name} cpu']:.1f})" for name in RUNS
    )
    yield f"{measured['pairs']:,.0f}"
    yield first
    yield f"{measured['first peak'] / 1e9:.2f} ({measured['first unmapped'] / 1e9:.2f})"
    yield from (cached, resumed)
    yield f"{measured['checkpoint']:.1f}"


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Seconds and memory over pairs; pairs and seconds are logarithmic."""
    from vanilla_transformer_tools.figures import new_figure, save_figure

    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    pairs = [measured["pairs"] for measured in rows]
    labels = {
        "first seconds": "first run",
        "cached seconds": "from the cache",
        "resumed seconds": "resumed",
        "checkpoint": "a checkpoint",
    }
    for name, label in labels.items():
        left.loglog(pairs, [measured[name] for measured in rows], "o-", label=label)
    left.set(xlabel="pairs", ylabel="seconds")
    for name, label in (("first peak", "all"), ("first unmapped", "not mapped from files")):
        right.semilogx(pairs, [measured[name] / 1e9 for measured in rows], "o-", label=label)
    right.set(xlabel="pairs", ylabel="memory, GB", ylim=(0, None))
    # Between the runs and the checkpoints.
    left.legend(loc=(0.03, 0.15))
    right.legend()
    save_figure(figure, path)


def made_lines(pairs: int, seed: int) -> Iterator[str]:
    """Lines of `WORDS` words on average; the word of rank r has a frequency of 1 / (r + 10)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    syllables = np.array([first + second for first in "bdfgklmnprstvwz" for second in "aeiou"])
    lengths = rng.integers(1, 5, _VOCABULARY)
    words = ["".join(rng.choice(syllables, length)) for length in lengths]
    shares = np.cumsum(1 / np.arange(10, _VOCABULARY + 10))
    places = (np.arange(_DRAWN_FROM) + 0.5) / _DRAWN_FROM
    drawn_from = np.searchsorted(shares, places * shares[-1])
    for first in range(0, pairs, _LINES_AT_A_TIME):
        counts = rng.integers(1, 2 * WORDS, min(_LINES_AT_A_TIME, pairs - first))
        drawn = drawn_from[rng.integers(0, _DRAWN_FROM, counts.sum())]
        following = map(words.__getitem__, drawn.tolist())
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
    reports = (line for line in done.stdout.splitlines() if line.startswith(_MARK))
    report: dict[str, float] = {}
    for line in reports:
        report |= json.loads(line.removeprefix(_MARK))
    return report


def report_first_update(argv: list[str]) -> None:
    """Runs `train` and prints what its only update took."""
    unmapped = MostUnmapped()
    unmapped.start()
    from transformers import TrainerCallback, trainer

    from vanilla_transformer_tools.commands.train import train

    class Report(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.updated = time.time()
            used = resource.getrusage(resource.RUSAGE_SELF)
            print_report(
                seconds=self.updated - float(os.environ["GROWTH_STARTED"]),
                cpu=used.ru_utime + used.ru_stime,
                peak=peak_memory(),
                unmapped=unmapped.bytes,
            )

        def on_save(self, *_: Any, **__: Any) -> None:
            print_report(checkpoint=time.time() - self.updated)

    trainer.DEFAULT_CALLBACKS.append(Report)
    train(argv)


class MostUnmapped(threading.Thread):
    """Looks again and again how much memory of this process is not mapped from files.

    Attributes:
        bytes: The most so far.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        """Looks until the process ends."""
        while True:
            self.bytes = max(self.bytes, unmapped_bytes())
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def print_report(**values: float) -> None:
    """A line that `run` finds among the others."""
    print(f"{_MARK}{json.dumps(values)}", flush=True)


def unmapped_bytes() -> int:
    """Memory of this process that is not mapped from files."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
