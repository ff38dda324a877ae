#!/usr/bin/env python
"""Lines per second of `translate --shard` in several processes at a time, each with one thread.

The time includes the start of the processes, which matters for short files. The speed is relative
to the first number of processes; same lines are those of its output.

Example:
  python benchmarks/processes.py --model runs/de-en --test test.de
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from lab import Report, benchmark_parser, seconds_of, speed_cells, take_turns
from vanilla_transformer_tools.files import read_lines

COLUMNS = ("processes", "lines/s", "range", "speed", "same lines")


def main() -> None:
    """Prints a row for each number of processes."""
    parser = benchmark_parser(__doc__, sizes=(1, 2), rounds=3)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    parser.add_argument("--test", required=True, type=Path, help="File of source lines.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = partial(translate, options.model, options.test, Path(scratch))
        try:
            runs = {number: partial(run, number) for number in options.sizes}
            seconds = take_turns(runs, options.rounds)
        except subprocess.CalledProcessError as error:
            parser.error(str(error))
        outputs = {number: joined(Path(scratch), number) for number in options.sizes}
    reference = options.sizes[0]
    lines = outputs[reference]
    report = Report(options.output)
    report.table(f"{options.model}, {len(lines)} lines", *COLUMNS)
    for number in options.sizes:
        cells = speed_cells(len(lines), seconds[number], seconds[reference], decimals=1)
        same = sum(map(str.__eq__, outputs[number], lines)) / len(lines)
        report.row(number, *cells, f"{same:.1%}")


def translate(model: str, test: Path, scratch: Path, number: int) -> float:
    """Seconds until all parts are translated.

    Raises:
        CalledProcessError: If a process fails.
    """
    program = [sys.executable, "-m", "vanilla_transformer_tools.commands", "translate"]
    commands = []
    for part in range(1, number + 1):
        output = part_of(scratch, number, part)
        output.unlink(missing_ok=True)
        words = ["--model", model, "--input", str(test), "--output", str(output)]
        commands.append([*program, *words, "--shard", f"{part}/{number}"])

    def wait() -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Standard error keeps the faults, and the progress of all processes.
        processes = [subprocess.Popen(command, env=environment) for command in commands]
        for process in processes:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, process.args)

    return seconds_of(wait)


def part_of(scratch: Path, number: int, part: int) -> Path:
    """The output of a process, one of `number`."""
    return scratch / f"{number}.{part}"


def joined(scratch: Path, number: int) -> list[str]:
    """The output of all processes, in order."""
    parts = (part_of(scratch, number, part) for part in range(1, number + 1))
    return [line for part in parts for line in read_lines(part)]


if __name__ == "__main__":
    main()
