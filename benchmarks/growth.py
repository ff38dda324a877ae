#!/usr/bin/env python
"""How a training run grows with its corpus: time to the first update, and memory.

For each number of pairs, made at random, 27 words a side, three runs of the command follow one
another, each in a process of its own: the first one tokenises the corpus, the second one finds the
token ids in the cache, and the third one resumes the second. Seconds count from the start of the
process to the end of its first update, imports included; those of a checkpoint are of its saving.
The vocabulary is that of the smallest corpus (--tokenizer); with --learn, the first run of each
size learns its own. Memory is the most that the first run has held until then, and in brackets what
of it is not mapped from files at that moment.

Example:
  python benchmarks/growth.py --pairs 10000 100000 1000000 --output growth.svg
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratio_tables import head, row

COLUMNS = ("pairs", "first update, s", "memory, MB", "from the cache, s", "resumed, s")
COLUMNS = (*COLUMNS, "checkpoint, s")
WORDS = 27
_VOCABULARY = 50_000
_LINES_AT_A_TIME = 10_000
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
    parser.add_argument("--learn", action="store_true", help="Learn a vocabulary for each size.")
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
    shared = ["--train", *map(str, corpus), "--preset", options.preset, "--disable_tqdm", "true"]
    shared += ["--save_strategy", "steps", "--save_steps", "1"]
    learned = ["--vocab_size", str(options.vocab_size)]
    given, vocabulary = learned, folder / "vocabulary"
    if not options.learn:
        if not vocabulary.exists():
            run([*shared, *learned, "--max_steps", "1"], vocabulary, folder / "unused")
        given = ["--tokenizer", str(vocabulary)]
    first = run([*shared, *given, "--max_steps", "1"], folder / f"first-{pairs}", folder / "cache")
    if options.learn:
        given = ["--tokenizer", str(folder / f"first-{pairs}")]
    again = folder / f"again-{pairs}"
    cached = run([*shared, *given, "--max_steps", "1"], again, folder / "cache")
    resumed = run([*shared, *given, "--max_steps", "2", "--resume"], again, folder / "cache")
    for path in corpus:
        path.unlink()
    return {
        "pairs": pairs,
        "first": first["seconds"],
        "peak": first["peak"],
        "unmapped": first["unmapped"],
        "cached": cached["seconds"],
        "resumed": resumed["seconds"],
        "checkpoint": first["checkpoint"],
    }


def cells(measured: dict[str, float]) -> Iterator[str]:
    """A row of the table."""
    yield f"{measured['pairs']:,.0f}"
    yield f"{measured['first']:.1f}"
    yield f"{measured['peak'] / 1e6:,.0f} ({measured['unmapped'] / 1e6:,.0f})"
    for name in ("cached", "resumed", "checkpoint"):
        yield f"{measured[name]:.1f}"


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Seconds to the first update over pairs, both logarithmic."""
    from vanilla_transformer.figures import new_figure, save_figure

    figure = new_figure(6, 4)
    axes = figure.subplots()
    pairs = [measured["pairs"] for measured in rows]
    for name, label in (("first", "tokenised"), ("cached", "from the cache"), ("resumed",) * 2):
        axes.loglog(pairs, [measured[name] for measured in rows], "o-", label=label)
    axes.set(xlabel="pairs", ylabel="seconds to the first update")
    axes.legend()
    save_figure(figure, path)


def made_lines(pairs: int, seed: int) -> Iterator[str]:
    """Lines of `WORDS` words on average; the word of rank r has a frequency of 1 / (r + 10)."""
    import numpy as np

    rng = np.random.default_rng(seed)
    syllables = np.array([first + second for first in "bdfgklmnprstvwz" for second in "aeiou"])
    lengths = rng.integers(1, 5, _VOCABULARY)
    words = np.array(["".join(rng.choice(syllables, length)) for length in lengths])
    shares = np.cumsum(1 / np.arange(10, _VOCABULARY + 10))
    for first in range(0, pairs, _LINES_AT_A_TIME):
        counts = rng.integers(1, 2 * WORDS, min(_LINES_AT_A_TIME, pairs - first))
        drawn = np.searchsorted(shares, rng.random(counts.sum()) * shares[-1])
        for line in np.split(words[drawn], np.cumsum(counts)[:-1]):
            yield " ".join(line) + "\n"


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
    from transformers import TrainerCallback, trainer

    from vanilla_transformer_cli.train import train

    class Report(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.updated = time.time()
            print_report(
                seconds=self.updated - float(os.environ["GROWTH_STARTED"]),
                peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                unmapped=unmapped_bytes(),
            )

        def on_save(self, *_: Any, **__: Any) -> None:
            print_report(checkpoint=time.time() - self.updated)

    trainer.DEFAULT_CALLBACKS.append(Report)
    train(argv)


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
