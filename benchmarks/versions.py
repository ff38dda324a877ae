#!/usr/bin/env python
"""Speed of training and of generation against another checkout of this repository.

Each checkout has a process of its own. They take turns in each round, on the same random tokens and
with weights from the same seed. Times are medians; a ratio below 1 means that this one is faster.

Example:
  git worktree add ../before main~1
  python benchmarks/versions.py ../before --presets tiny base --rounds 9
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from ratio_tables import head, ratio, row
from rounds import take_turns

HERE = Path(__file__).resolve().parents[1]
SOURCES, LENGTH, VOCABULARY = 32, 24, 10_000
TASKS = ("training", "training in bfloat16", "greedy", "beam 4", "beam 4, one sentence")


def main() -> int:
    """Prints a Markdown table; returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("other", type=Path, help="Folder of the other checkout.")
    parser.add_argument(
        "--presets", nargs="+", default=["tiny", "base"], choices=("tiny", "small", "base", "big")
    )
    parser.add_argument("--rounds", type=int, default=9, help="Default: 9.")
    options = parser.parse_args()
    if not (options.other / "src" / "vanilla_transformer").is_dir():
        print(f"{options.other} must be a checkout with src/vanilla_transformer.", file=sys.stderr)
        return 2
    print(head("preset", "task", "other, s", "this, s", "this / other"))
    for preset in options.presets:
        workers = [Worker(folder, preset) for folder in (options.other, HERE)]
        for task in TASKS:
            runs = {index: partial(worker.run, task) for index, worker in enumerate(workers)}
            other, this = take_turns(runs, options.rounds, warm_ups=2).values()
            print(table_row(preset, task, other, this), flush=True)
        for worker in workers:
            worker.process.communicate()
    return 0


def table_row(preset: str, task: str, other: list[float], this: list[float]) -> str:
    """Median seconds of both, and this checkout's as a multiple of the other's."""
    return row(preset, task, f"{median(other):.3f}", f"{median(this):.3f}", ratio(this, other))


class Worker:
    """A process that has imported one checkout.

    Args:
        folder: Of the checkout.
        preset: Of the model.
    """

    def __init__(self, folder: Path, preset: str) -> None:
        from vanilla_transformer_tools.settings import PRESETS

        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(PRESETS[preset].config())],
            env={**os.environ, "PYTHONPATH": str(folder.resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, task: str) -> float:
        """Seconds for a task."""
        self.process.stdin.write(f"{task}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def work(sizes: dict[str, float]) -> None:
    """Runs the tasks that it reads, and prints the seconds of each."""
    tasks = build_tasks(sizes)
    for line in sys.stdin:
        started = time.perf_counter()
        tasks[line.strip()]()
        print(time.perf_counter() - started, flush=True)


def build_tasks(sizes: dict[str, float]) -> dict[str, Callable[[], None]]:
    """What is measured, by name, with a model of these sizes."""
    import torch

    from vanilla_transformer import (
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
    )

    torch.manual_seed(0)
    config = VanillaTransformerConfig(**sizes, vocab_size=VOCABULARY)
    model = VanillaTransformerForConditionalGeneration(config)
    adam = torch.optim.Adam(model.parameters(), lr=1e-5)
    ids = torch.randint(4, VOCABULARY, (SOURCES, LENGTH))

    def train(is_reduced: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_reduced):
            model.train()(input_ids=ids, labels=ids).loss.backward()
        adam.step()
        adam.zero_grad()

    def generate(num_beams: int, sources: int) -> None:
        model.eval().generate(ids[:sources], num_beams=num_beams, max_length=LENGTH)

    calls = (
        partial(train, is_reduced=False),
        partial(train, is_reduced=True),
        partial(generate, 1, SOURCES),
        partial(generate, 4, SOURCES),
        partial(generate, 4, 1),
    )
    return dict(zip(TASKS, calls, strict=True))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
