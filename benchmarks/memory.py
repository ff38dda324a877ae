"""Peak memory of a call in a process of its own, on Linux."""

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Memory:
    """Memory of a process, in bytes.

    Attributes:
        start: Before the call, with everything imported.
        peak: The most at any time.
        result: What the call returned.
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
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_measure, work, *arguments).result()


def _measure(work: Callable[..., Any], *arguments: Any) -> Memory:
    start = psutil.Process().memory_info().rss
    result = work(*arguments)
    return Memory(start, peak_memory(), result)


def peak_memory(process: int | str = "self") -> int:
    """Peak memory of this process in bytes, or of the one with this id."""
    # Not `ru_maxrss`, which a process inherits from its parent.
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
