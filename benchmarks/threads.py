#!/usr/bin/env python
"""Seconds with each number of threads, and with the idle cores that the commands count.

Busy programs are processes that compute all the time. All numbers of threads take turns, on the
same random tokens; the ratio is that of the idle cores to the best fixed number.

Example:
  python benchmarks/threads.py --sizes tiny base --neighbours 0 1 2
  taskset --cpu-list 0 python benchmarks/threads.py --neighbours 0
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from transformers import BatchEncoding

from lab import PRESETS, Report, benchmark_parser, ratio, seconds_of, take_turns
from neighbours import Training, build
from vanilla_transformer_tools.threads import IdleCores

SOURCES, LENGTH, VOCABULARY = 32, 24, 10_000
# Time that the busy programs have to start.
SECONDS_TO_START = 1.0
# They end when their standard input does, at the latest with this process, whose children they are
# not: the work of its children would count as its own.
_BUSY = """if True:
    import os, select
    if os.fork():
        os._exit(0)
    while not select.select([0], [], [], 0)[0]:
        pass
"""


def main() -> None:
    """Prints a table."""
    parser = benchmark_parser(__doc__, sizes=("tiny", "base"), rounds=5)
    counts = {"nargs": "+", "type": int, "default": [0, 1, 2]}
    parser.add_argument("--neighbours", **counts, help="Busy programs (default: 0 1 2).")
    options = parser.parse_args()
    if "OMP_NUM_THREADS" in os.environ:
        parser.error("OMP_NUM_THREADS fixes the number of threads: unset it")
    # Under `taskset` torch starts with fewer than the machine has.
    numbers = range(1, max(torch.get_num_threads(), os.cpu_count() or 1) + 1)
    names = [f"{number} thread{'s' * (number > 1)}, s" for number in numbers]
    report = Report(options.output)
    report.table("Seconds", "size", "task", "busy programs", *names, "idle cores, s", "ratio")
    for size in options.sizes:
        tasks = build_tasks(size)
        for neighbours in options.neighbours:
            with busy_programs(neighbours):
                for name, task in tasks.items():
                    runs = contenders(task, numbers)
                    seconds = take_turns(runs, options.rounds, warm_ups=1)
                    report.row(size, name, neighbours, *cells(seconds))


def build_tasks(size: str) -> dict[str, Callable[[], object]]:
    """What is measured, by name, with a model of a preset."""
    trained, model = (
        build("vanilla", vocab_size=VOCABULARY, **PRESETS[size].config()) for _ in range(2)
    )
    ids = torch.randint(4, VOCABULARY, (SOURCES, LENGTH))
    generate = partial(model.eval().generate, max_length=LENGTH)
    return {
        "training": Training(trained, [BatchEncoding({"input_ids": ids, "labels": ids})]).run,
        "greedy": partial(generate, ids, num_beams=1),
        "beam 4, one sentence": partial(generate, ids[:1], num_beams=4),
    }


def contenders(task: Callable[[], object], numbers: range) -> dict[int | None, Callable[[], float]]:
    """Seconds of a task by number of threads; None: that of idle cores."""

    def timed(number: int | None) -> float:
        if number is None:
            IdleCores().use()
        else:
            torch.set_num_threads(number)
        return seconds_of(task)

    return {number: partial(timed, number) for number in (*numbers, None)}


def cells(seconds: dict[int | None, list[float]]) -> list[str]:
    """Median seconds of all, and those of idle cores as a multiple of the best fixed number's."""
    fixed = [seconds[number] for number in seconds if number is not None]
    idle = seconds[None]
    return [
        *(f"{median(each):.3f}" for each in (*fixed, idle)),
        ratio(idle, min(fixed, key=median)),
    ]


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Runs `count` processes that compute all the time."""
    command = [sys.executable, "-c", _BUSY]
    programs = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(count)]
    try:
        time.sleep(SECONDS_TO_START)
        yield
    finally:
        for program in programs:
            program.communicate()


if __name__ == "__main__":
    main()
