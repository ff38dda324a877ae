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

from lab import Report, benchmark_parser, ratio, seconds_of, take_turns

HERE = Path(__file__).resolve().parents[1]
# Layers of each stack, width, feed-forward width and heads.
SIZES = {"tiny": (4, 128, 256, 4), "base": (6, 512, 2048, 8)}
SOURCES, LENGTH, VOCABULARY = 32, 24, 10_000
TASKS = ("training", "training in bfloat16", "greedy", "beam 4", "beam 4, one sentence")


def main() -> int:
    """Prints a table; returns the exit status."""
    parser = benchmark_parser(__doc__, sizes=tuple(SIZES), known=SIZES, rounds=9)
    parser.add_argument("other", type=Path, help="Folder of the other checkout.")
    options = parser.parse_args()
    if not (options.other / "src" / "vanilla_transformer").is_dir():
        parser.error(f"{options.other} must be a checkout with src/vanilla_transformer.")
    report = Report(options.output)
    report.table("Seconds", "size", "task", "other, s", "this, s", "this / other")
    for size in options.sizes:
        workers = [Worker(folder, size) for folder in (options.other, HERE)]
        for task in TASKS:
            runs = {index: partial(worker.run, task) for index, worker in enumerate(workers)}
            other, this = take_turns(runs, options.rounds, warm_ups=2).values()
            seconds = (f"{median(one):.3f}" for one in (other, this))
            report.row(size, task, *seconds, ratio(this, other))
        for worker in workers:
            worker.process.communicate()
    return 0


class Worker:
    """A process that has imported one checkout.

    Args:
        folder: Folder of the checkout.
        size: Name in `SIZES`.
    """

    def __init__(self, folder: Path, size: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(SIZES[size])],
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


def work(layers: int, width: int, ffn_dim: int, heads: int) -> None:
    """Runs the tasks that it reads, and prints the seconds of each."""
    tasks = build_tasks(layers, width, ffn_dim, heads)
    for line in sys.stdin:
        print(seconds_of(tasks[line.strip()]), flush=True)


def build_tasks(layers: int, width: int, ffn_dim: int, heads: int) -> dict[str, Callable[[], None]]:
    """What is measured, by name, with a model of these sizes."""
    import torch

    from vanilla_transformer import (
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
    )

    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=VOCABULARY,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn_dim,
        decoder_ffn_dim=ffn_dim,
    )
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
        work(*json.loads(sys.argv[2]))
    else:
        sys.exit(main())
