"""How many threads compute: as many as there are cores that other programs leave idle.

OpenMP's threads wait for each other by spinning. Where another program has one of the cores, all of
them wait for the thread that was put off, and a step takes many times as long as with one thread
less (docs/speed.md, Threads).
"""

import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

# Seconds that cores are watched at least; the system counts hundredths of seconds.
INTERVAL = 0.3
# Microseconds of work in each period of so many; "max": no quota. A container sees its own.
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# States in which a core works; a guest's work is counted in the first two as well.
_WORK = ("user", "nice", "system", "irq", "softirq", "steal")


class IdleCores:
    """Sets torch's number of threads to the number of cores that other programs leave idle.

    They are watched from the making of the object until `use`, while files are read. The number
    then stays, because with another one sums are rounded differently. Does nothing if the user has
    set `OMP_NUM_THREADS`.
    """

    def __init__(self) -> None:
        self._is_free = "OMP_NUM_THREADS" not in os.environ
        if self._is_free:
            self._began, self._before = time.monotonic(), _work_of_others()

    def use(self) -> None:
        """Counts idle cores and uses them; to be called in the thread that computes."""
        if not self._is_free:
            return
        time.sleep(max(0.0, INTERVAL - (time.monotonic() - self._began)))
        work = max(0.0, _work_of_others() - self._before)
        cores = len(_cores())
        idle = cores - work / (time.monotonic() - self._began)
        # Imported late, so that the clock can start before torch is loaded.
        import torch

        torch.set_num_threads(max(1, min(cores, _quota(), math.floor(idle + 0.5))))


def _cores() -> list[int]:
    """Numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def _work_of_others() -> float:
    """Seconds that other programs have worked on our cores; 0 where the system does not say."""
    times, cores = psutil.cpu_times(percpu=True), _cores()
    # Where some cores are offline or hidden, the places in the list are not their numbers.
    if max(cores) >= len(times):
        return 0.0
    busy = sum(getattr(times[core], kind, 0.0) for core in cores for kind in _WORK)
    process = psutil.Process()
    own = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            own += sum(child.cpu_times()[:2])
    return busy - own


def _quota() -> int:
    """Whole cores within the quota of this process's container."""
    with suppress(OSError, ValueError):
        quota, period = map(int, QUOTA.read_text(encoding="ascii").split())
        return quota // period
    return sys.maxsize
