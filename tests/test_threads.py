"""Threads: as many as there are idle cores, within what the process may use."""

from types import SimpleNamespace

import pytest
import torch

from vanilla_transformer_tools import threads
from vanilla_transformer_tools.threads import INTERVAL, IdleCores


class Machine:
    """Eight cores, and two clocks that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = self.own = self.children = 0.0
        self.others = 50.0
        self.threads = self.slept = 0

    def times(self, percpu: bool) -> list[SimpleNamespace]:
        """Times of each core; a guest's work is counted in `user` too."""
        work = (self.others + self.own + self.children) / 8
        free = {"idle": 1e6 + self.now, "iowait": self.now}
        return [SimpleNamespace(user=work, nice=0.0, system=0.0, guest=work, **free)] * 8

    def process(self) -> SimpleNamespace:
        child = SimpleNamespace(cpu_times=lambda: (self.children, 0.0, self.children, 0.0))
        return SimpleNamespace(
            cpu_times=lambda: (self.own, 0.0, 0.0, 0.0, 77.0), children=lambda recursive: [child]
        )

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds

    def pass_time(self, seconds: float, *, others: float, own: float = 0, children: float = 0):
        """So many seconds, in which so many cores are kept busy."""
        self.now += seconds
        self.others += others * seconds
        self.own += own * seconds
        self.children += children * seconds


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    machine = Machine()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads, "_cores", lambda: list(range(8)))
    monkeypatch.setattr(threads.psutil, "cpu_times", machine.times)
    monkeypatch.setattr(threads.psutil, "Process", machine.process)
    monkeypatch.setattr(threads.time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(threads.time, "sleep", machine.sleep)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda number: vars(machine).update(threads=number)
    )
    return machine


def threads_beside(machine, **work):
    """Threads that are used after some time in which so many cores were kept busy."""
    cores = IdleCores()
    machine.pass_time(INTERVAL, **work)
    cores.use()
    return machine.threads


@pytest.mark.parametrize(("others", "expected"), [(0.4, 8), (0.6, 7), (3.4, 5), (9, 1)])
def test_cores_of_other_programs_are_left_to_them(machine, others, expected):
    assert threads_beside(machine, others=others) == expected


def test_own_work_and_that_of_children_leaves_cores_idle(machine):
    assert threads_beside(machine, others=1, own=4, children=2) == 7


@pytest.mark.parametrize(
    ("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 5)]
)
def test_quota_of_a_container_is_kept(machine, tmp_path, quota, expected):
    (tmp_path / "cpu.max").write_text(quota)

    assert threads_beside(machine, others=3) == expected


def test_cores_count_as_idle_when_one_of_them_is_not_listed(machine, monkeypatch):
    monkeypatch.setattr(threads, "_cores", lambda: [0, 1, 8])

    assert threads_beside(machine, others=3) == 3


def test_number_that_the_user_has_set_stays(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_work_of_others", lambda: pytest.fail("looked"))

    assert threads_beside(machine, others=3) == 0


def test_this_machine_is_counted(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    try:
        IdleCores().use()

        assert 1 <= torch.get_num_threads() <= len(threads._cores())
    finally:
        torch.set_num_threads(before)
