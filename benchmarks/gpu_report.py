"""What the commands of benchmarks/gpu.py share: time, memory, failures, and files of results."""

import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import torch

from neighbours import hardware_line
from ratio_tables import head, row

Result = TypeVar("Result")

# Dense bfloat16 products with float32 sums, in TFLOP/s, from the makers' data sheets. The first
# name that a device's name contains as words decides.
BF16_PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "A10": 125,
    "A10G": 70,
    "L4": 121,
    "L40S": 362,
    "RTX A6000": 155,
    "RTX 4090": 165,
}


def bf16_peak(device_name: str) -> int | None:
    """Dense bfloat16 peak in TFLOP/s; None for a device that is not in the table."""
    for name, peak in BF16_PEAKS.items():
        if re.search(rf"\b{name}\b", device_name):
            return peak
    return None


def wait() -> None:
    """Returns when the GPU, if there is one, has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds of a call, including what it left in the GPU's queue."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def growth_of(work: Callable[[], Any]) -> float | None:
    """What a call adds to the GPU's memory at its peak, in MB; None without a GPU."""
    if not torch.cuda.is_available():
        work()
        return None
    wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


@dataclass
class Table:
    """Rows of numbers, words and None."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[Any]] = field(default_factory=list)

    def markdown(self) -> str:
        """With its title above it."""
        lines = [row(*map(shown, cells)) for cells in self.rows]
        return "\n".join([f"## {self.title}", "", head(*self.columns), *lines])


def shown(value: Any) -> str:
    """A cell: integers and large numbers with commas, others with three digits, None as `-`."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Report:
    """The tables of one command, written anew after each row, so that a kill loses one at most.

    Args:
        command: Names the files, `COMMAND.json` and `COMMAND.md`.
        folder: Where they are written.
        minutes: After them no new measurement begins.
        note: What the tables mean.
    """

    def __init__(self, command: str, folder: Path, minutes: float, note: str = "") -> None:
        self.command = command
        self.folder = folder
        self.note = note
        self.started = time.monotonic()
        self.minutes = minutes
        self.tables: list[Table] = []
        self.failures: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def table(self, title: str, *columns: str) -> Table:
        """A new table, to which `add` adds rows."""
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def add(self, table: Table, *cells: Any) -> None:
        """Adds a row and writes the files."""
        table.rows.append(list(cells))
        self.write()

    def attempt(self, what: str, work: Callable[[], Result]) -> Result | None:
        """The result of a call; None if it fails or does not fit, which the report states.

        Args:
            what: Names the call.
            work: What to do.
        """
        if time.monotonic() - self.started > 60 * self.minutes:
            self.left_out[what] = f"{self.minutes:g} minutes are over"
            return None
        try:
            return work()
        except torch.OutOfMemoryError:
            self.left_out[what] = "out of memory"
            return None
        except Exception as error:
            traceback.print_exc()
            self.failures[what] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            return None

    def write(self) -> None:
        """Writes both files."""
        facts = {
            "command": self.command,
            "date": date.today().isoformat(),
            "hardware": hardware_line(),
            "seconds": round(time.monotonic() - self.started, 1),
            "failures": self.failures,
            "left_out": self.left_out,
            "tables": [vars(table) for table in self.tables],
        }
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        (self.folder / f"{self.command}.json").write_text(f"{text}\n", encoding="utf-8")
        (self.folder / f"{self.command}.md").write_text(self._markdown(facts), encoding="utf-8")

    def _markdown(self, facts: dict[str, Any]) -> str:
        blocks = [
            f"# gpu.py {self.command}",
            f"{facts['date']}, {facts['hardware']}, {facts['seconds']:.0f} s. {self.note}".strip(),
        ]
        if self.failures:
            lines = (f"- {what}: `{error}`" for what, error in self.failures.items())
            blocks.append("\n".join(["Failed:", "", *lines]))
        if self.left_out:
            lines = (f"- {what}: {reason}" for what, reason in self.left_out.items())
            blocks.append("\n".join(["Left out:", "", *lines]))
        blocks += [table.markdown() for table in self.tables]
        return "\n\n".join(blocks) + "\n"
