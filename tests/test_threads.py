"""Threads: as many as there are idle cores, within what the process may use."""

from types import SimpleNamespace

import pytest
import torch

from vanilla_transformer_tools import threads
from vanilla_transformer_tools.threads import INTERVAL, IdleCores


class Machine:
    """Eight cores, and two clocks that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = self.others = self.own = self.children = 0.0
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
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(threads, "_cores", lambda: list(range(8)))
    monkeypatch.setattr(threads.psutil, "cpu_times", machine.times)
    monkeypatch.setattr(threads.psutil, "Process", machine.process)
    monkeypatch.setattr(threads.time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(threads.time, "sleep", machine.sleep)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda number: vars(machine).update(threads=number)
    )
    return machine


@pytest.mark.parametrize(("others", "expected"), [(0.4, 8), (0.6, 7), (3.5, 5), (9, 1)])
def test_cores_of_other_programs_are_left_to_them(machine, others, expected):
    cores = IdleCores()
    machine.pass_time(INTERVAL, others=others)

    cores.use()

    assert machine.threads == expected


def test_own_work_and_that_of_children_leaves_cores_idle(machine):
    cores = IdleCores()
    machine.pass_time(INTERVAL, others=1, own=4, children=2)

    cores.use()

    assert machine.threads == 7


@pytest.fixture
def write_quota(tmp_path):
    """Writes the quota of a control group, in both versions."""

    def write(folder: str, *texts: str) -> None:
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        names = ("cpu.max",) if len(texts) == 1 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for name, text in zip(names, texts, strict=True):
            (place / name).write_text(text)

    return write


def threads_beside_three(machine):
    """Threads on eight cores, of which three are busy."""
    cores = IdleCores()
    machine.pass_time(INTERVAL, others=3)
    cores.use()
    return machine.threads


@pytest.mark.parametrize(
    ("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 5)]
)
def test_quota_of_a_container_is_kept(machine, write_quota, quota, expected):
    write_quota("", quota)

    assert threads_beside_three(machine) == expected


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"a.slice/b:c.service": "300000"}, 3),
        ({"a.slice": "200000", "a.slice/b:c.service": "400000"}, 2),
        ({"other.slice": "100000"}, 5),
    ],
)
def test_smallest_quota_of_the_own_groups_and_those_above_is_kept(
    machine, write_quota, tmp_path, quotas, expected
):
    (tmp_path / "own").write_text("7:memory:/other.slice\n0::/a.slice/b:c.service\n")
    for folder, quota in quotas.items():
        write_quota(folder, f"{quota} 100000")

    assert threads_beside_three(machine) == expected


def test_quota_of_a_group_of_the_first_version_is_kept(machine, write_quota, tmp_path):
    (tmp_path / "own").write_text("4:cpu,cpuacct:/slurm/job_1\n1:name=systemd:/other\n0::/\n")
    write_quota("cpu/slurm", "200000", "100000")
    write_quota("cpu/other", "100000", "100000")

    assert threads_beside_three(machine) == 2


@pytest.mark.parametrize("cores", [[0, 1, 8]])
def test_cores_count_as_idle_when_one_of_them_is_not_listed(machine, monkeypatch, cores):
    monkeypatch.setattr(threads, "_cores", lambda: cores)

    assert threads_beside_three(machine) == len(cores)


def test_number_that_the_user_has_set_stays(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_look", lambda: pytest.fail("looked"))
    cores = IdleCores()
    machine.pass_time(INTERVAL, others=3)

    cores.use()

    assert machine.threads == 0


def test_this_machine_is_counted(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = torch.get_num_threads()
    try:
        IdleCores().use()

        assert 1 <= torch.get_num_threads() <= len(threads._cores())
    finally:
        torch.set_num_threads(before)
