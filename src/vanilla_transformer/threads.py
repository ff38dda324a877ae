"""How many threads compute: as many as there are cores that other programs leave idle.

OpenMP's threads wait for each other by spinning. Where another program has one of the cores, all of
them wait for the thread that was put off, and a step takes many times as long as with one thread
less (docs/speed.md, Threads).
"""

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

# Seconds between two looks; a shorter one sees single bursts.
INTERVAL = 5.0
# A first look takes at least this long; the system counts hundredths of seconds.
FIRST_INTERVAL = 0.3

# Of a container: microseconds of work in each period of so many, in one file or, with the first
# version of control groups, in two. "max" or a negative number: no quota.
QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)

_WORK = ("user", "nice", "system", "irq", "softirq", "steal")


class IdleCores:
    """Sets torch's number of threads to that of idle cores, again and again.

    Does nothing if the user has set `OMP_NUM_THREADS`. With another number of threads sums are
    rounded differently.
    """

    def __init__(self) -> None:
        self.is_fixed = "OMP_NUM_THREADS" in os.environ
        self._seen = _times()

    def use(self, at_once: bool = False) -> None:
        """Counts idle cores and uses them, if it did so at least `INTERVAL` seconds ago.

        To be called in the thread that computes, because OpenMP has a number for each.

        Args:
            at_once: Counts now, over a short time if need be.
        """
        if self.is_fixed:
            return
        elapsed = time.monotonic() - self._seen[0]
        if at_once:
            time.sleep(max(0.0, FIRST_INTERVAL - elapsed))
        elif elapsed < INTERVAL:
            return
        before, self._seen = self._seen, _times()
        seconds, busy, own = (now - then for now, then in zip(self._seen, before, strict=True))
        idle = len(_cores()) - max(0.0, busy - own) / seconds
        # Imported late, so that the clock can start before torch is loaded.
        import torch

        torch.set_num_threads(max(1, min(_allowed(), math.floor(idle + 0.5))))


def _allowed() -> int:
    """Cores that this process may keep busy: those it may run on, within its container's quota."""
    cores = len(_cores())
    for files in QUOTAS:
        with suppress(OSError, ValueError):
            text = " ".join(file.read_text(encoding="ascii") for file in files)
            quota, period = map(int, text.split())
            if quota > 0:
                return min(cores, quota // period)
    return cores


def _cores() -> list[int]:
    """Numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def _times() -> tuple[float, float, float]:
    """Seconds: of a clock, of work on our cores, and of that by this process and its children."""
    per_core = psutil.cpu_times(percpu=True)
    busy = sum(getattr(per_core[core], kind, 0.0) for core in _cores() for kind in _WORK)
    process = psutil.Process()
    own = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            own += sum(child.cpu_times()[:2])
    return time.monotonic(), busy, own
