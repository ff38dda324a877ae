#!/usr/bin/env python
"""Seconds with each number of threads, and with the idle cores that the commands count.

The other programs are processes that compute all the time. All numbers of threads take turns in
each round, on the same random tokens. Times are medians, and the ratio is that of the idle cores to
the best fixed number.

Example:
  python benchmarks/threads.py --presets tiny base --neighbours 0 1 2
  taskset --cpu-list 0 python benchmarks/threads.py --neighbours 0
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from ratio_tables import head, ratio, row
from rounds import take_turns
from versions import build_tasks

TASKS = ("training", "greedy", "beam 4, one sentence")
# Of the other programs before anything is measured.
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


def main() -> int:
    """Prints a Markdown table; returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--presets", nargs="+", default=["tiny", "base"], choices=("tiny", "small", "base", "big")
    )
    parser.add_argument(
        "--neighbours",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="Busy programs; default: 0 1 2.",
    )
    parser.add_argument("--rounds", type=int, default=5, help="Default: 5.")
    options = parser.parse_args()
    if "OMP_NUM_THREADS" in os.environ:
        print("OMP_NUM_THREADS fixes the number of threads: unset it.", file=sys.stderr)
        return 2

    import torch

    from vanilla_transformer_tools.settings import PRESETS

    # Under `taskset` torch starts with fewer than the machine has.
    numbers = range(1, max(torch.get_num_threads(), os.cpu_count() or 1) + 1)
    names = [f"{number} thread{'s' * (number > 1)}, s" for number in numbers]
    print(head("preset", "task", "busy programs", *names, "idle cores, s", "ratio"))
    for preset in options.presets:
        tasks = build_tasks(PRESETS[preset].config())
        for neighbours in options.neighbours:
            with busy_programs(neighbours):
                for task in TASKS:
                    runs = contenders(tasks[task], numbers)
                    seconds = take_turns(runs, options.rounds, warm_ups=1)
                    print(table_row(preset, task, neighbours, seconds), flush=True)
    return 0


def contenders(task: Callable[[], None], numbers: range) -> dict[int | None, Callable[[], float]]:
    """Seconds of a task by number of threads; None: that of idle cores."""
    import torch

    from vanilla_transformer_tools.threads import IdleCores

    def timed(number: int | None) -> float:
        if number is None:
            IdleCores().use()
        else:
            torch.set_num_threads(number)
        started = time.perf_counter()
        task()
        return time.perf_counter() - started

    return {number: partial(timed, number) for number in (*numbers, None)}


def table_row(
    preset: str, task: str, neighbours: int, seconds: dict[int | None, list[float]]
) -> str:
    """Median seconds of all, and those of idle cores as a multiple of the best fixed number's."""
    fixed = [seconds[number] for number in seconds if number is not None]
    idle = seconds[None]
    cells = [f"{median(each):.3f}" for each in (*fixed, idle)]
    return row(preset, task, neighbours, *cells, ratio(idle, min(fixed, key=median)))


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
    sys.exit(main())
