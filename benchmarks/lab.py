"""What all benchmarks share: options, contenders that take turns, memory, and the report.

Contenders take turns in each round, so that what slows the machine down for a while slows all of
them. Times are medians of the rounds.
"""

import argparse
import gc
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from vanilla_transformer_tools.settings import PRESETS

Name = TypeVar("Name", bound=Hashable)
Measured = TypeVar("Measured")


def benchmark_parser(
    description: str | None,
    sizes: Sequence[object] = (),
    known: Iterable[str] = PRESETS,
    rounds: int | None = None,
) -> argparse.ArgumentParser:
    """The options that all benchmarks have.

    Args:
        description: The benchmark's docstring.
        sizes: Default of `--sizes`, names or numbers; without any there is no such option.
        known: Sizes that have a name.
        rounds: Default of `--rounds`; None: no such option.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    if sizes:
        text = f"Default: {' '.join(map(str, sizes))}."
        names = {"choices": tuple(known)} if isinstance(sizes[0], str) else {"type": int}
        parser.add_argument("--sizes", nargs="+", default=list(sizes), help=text, **names)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"Default: {rounds}.")
    parser.add_argument("--output", type=Path, help="Markdown file of the report, written anew.")
    return parser


def take_turns(
    contenders: Mapping[Name, Callable[[], Measured]], rounds: int, *, warm_ups: int = 0
) -> dict[Name, list[Measured]]:
    """What each contender returns, one value for each round.

    Args:
        contenders: Calls that return a measurement, by name.
        rounds: Number of rounds that count.
        warm_ups: Number of rounds before these.
    """
    measured: dict[Name, list[Measured]] = {name: [] for name in contenders}
    for _ in range(warm_ups + rounds):
        for name, run in contenders.items():
            measured[name].append(run())
    return {name: values[warm_ups:] for name, values in measured.items()}


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds of a call, including what it leaves in a GPU's queue."""
    wait_for_gpu()
    started = time.perf_counter()
    work()
    wait_for_gpu()
    return time.perf_counter() - started


def wait_for_gpu() -> None:
    """Returns when the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Memory:
    """Memory of a process, or of its GPU, in bytes.

    Attributes:
        start: Memory before the call, with everything imported.
        peak: Most memory at any time.
        result: Result of the call.
    """

    start: int
    peak: int
    result: Any = None

    @property
    def growth(self) -> int:
        """What the call added at its peak."""
        return self.peak - self.start


def measure_alone(work: Callable[..., Any], *arguments: Any) -> Memory:
    """Calls a function of a module in a fresh process, which inherits no memory."""
    # What is no longer used leaves room for the process; trainers refer to themselves.
    gc.collect()
    torch.cuda.empty_cache()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, work, *arguments).result()


def _measure(work: Callable[..., Any], *arguments: Any) -> Memory:
    start = process_memory("VmRSS")
    result = work(*arguments)
    if torch.cuda.is_available():
        return Memory(0, torch.cuda.max_memory_allocated(), result)
    return Memory(start, process_memory(), result)


def process_memory(field: str = "VmHWM", process: int | str = "self") -> int:
    """Bytes of this process, or of the one with this id, on Linux; by default at its peak."""
    # Not `ru_maxrss`, which a process inherits from its parent.
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


class Report:
    """Markdown on the standard output and, if asked for, in a file, as soon as it is measured.

    Args:
        output: The file.
    """

    def __init__(self, output: Path | None = None) -> None:
        self.output = output
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text("", encoding="utf-8")

    def add(self, text: str) -> None:
        """Adds a line or several."""
        print(text, flush=True)
        if self.output:
            with self.output.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    def table(self, note: str, *columns: str) -> None:
        """Begins a table below a note, which also names the hardware and versions."""
        self.add(f"\n{note}; {hardware_line()}\n\n{row(*columns)}\n{row(*['---'] * len(columns))}")

    def row(self, *cells: object) -> None:
        """Adds a line to the table."""
        self.add(row(*cells))


def row(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def ratio(values: Sequence[float], reference: Sequence[float]) -> str:
    """The median of the rounds, divided by that of a reference."""
    return f"{median(values) / median(reference):.2f}"


def speed_cells(
    count: int, seconds: Sequence[float], reference: Sequence[float], decimals: int = 0
) -> list[str]:
    """Items per second, their range over the rounds, and the speed relative to a reference.

    Args:
        count: Items of a round.
        seconds: Seconds of each round.
        reference: Seconds of each round of the contender whose speed is 1.00.
        decimals: Digits after the point.
    """
    rates = [f"{count / each(seconds):,.{decimals}f}" for each in (median, max, min)]
    return [rates[0], "-".join(rates[1:]), ratio(reference, seconds)]


def megabytes(*sizes: float) -> list[str]:
    """Bytes as whole megabytes."""
    return [f"{size / 1e6:,.0f}" for size in sizes]


def hardware_line() -> str:
    """Device, threads and versions."""
    # Imported late: processes that measure their memory need none of it.
    from transformers import __version__

    from vanilla_transformer_tools.training.machine import hardware

    name = hardware(torch.device(best_device()))
    return f"{name}, torch {torch.__version__}, transformers {__version__}"


def best_device() -> str:
    """The device on which contenders run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
