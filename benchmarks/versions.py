#!/usr/bin/env python
"""Speed of training and of generation against another checkout of this repository.

Each checkout has a process of its own; weights and random tokens are the same. A ratio below 1
means that this checkout is faster.

Example:
  git worktree add ../before main~1
  python benchmarks/versions.py ../before --sizes tiny base
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from lab import PRESETS, Report, benchmark_parser, ratio, row, seconds_of, take_turns

HERE = Path(__file__).resolve().parents[1]
SOURCES, LENGTH, VOCABULARY = 32, 24, 10_000
TASKS = ("training", "training in bfloat16", "greedy", "beam 4", "beam 4, one sentence")


def main() -> int:
    """Prints a table; returns the exit status."""
    parser = benchmark_parser(__doc__, sizes=("tiny", "base"), known=PRESETS, rounds=9)
    parser.add_argument("other", type=Path, help="Folder of the other checkout.")
    options = parser.parse_args()
    if not (options.other / "src" / "vanilla_transformer").is_dir():
        print(f"{options.other} must be a checkout with src/vanilla_transformer.", file=sys.stderr)
        return 2
    report = Report(options.output)
    report.table("Seconds", "size", "task", "other, s", "this, s", "this / other")
    for size in options.sizes:
        workers = [Worker(folder, size) for folder in (options.other, HERE)]
        for task in TASKS:
            runs = {index: partial(worker.run, task) for index, worker in enumerate(workers)}
            other, this = take_turns(runs, options.rounds, warm_ups=2).values()
            report.add(table_row(size, task, other, this))
        for worker in workers:
            worker.process.communicate()
    return 0


def table_row(size: str, task: str, other: list[float], this: list[float]) -> str:
    """Median seconds of both, and this checkout's as a multiple of the other's."""
    return row(size, task, f"{median(other):.3f}", f"{median(this):.3f}", ratio(this, other))


class Worker:
    """A process that has imported one checkout.

    Args:
        folder: Folder of the checkout.
        size: Preset of the model.
    """

    def __init__(self, folder: Path, size: str) -> None:
        from vanilla_transformer_tools.settings import PRESETS

        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(PRESETS[size].config())],
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
        print(seconds_of(tasks[line.strip()]), flush=True)


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
