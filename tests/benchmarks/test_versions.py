"""`benchmarks/versions.py`: this checkout against another one, not the reverse."""

import sys
from types import SimpleNamespace

from ..support.documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import versions
from versions import TASKS, Worker, table_row


def test_row_divides_our_median_by_the_others():
    cells = table_row("tiny", "greedy", other=[1.0, 2.0, 9.0], this=[3.0, 3.0, 0.5])

    assert cells == "| tiny | greedy | 2.000 | 3.000 | 1.50 |"


def test_checkouts_are_named_and_warmed_up(monkeypatch, tmp_path, capsys):
    runs = []

    class Clock:
        """Two seconds for this checkout, one for another."""

        process = SimpleNamespace(communicate=lambda: None)

        def __init__(self, folder, preset):
            self.seconds = 2.0 if folder == ROOT else 1.0

        def run(self, task):
            runs.append(task)
            return self.seconds

    (tmp_path / "src" / "vanilla_transformer").mkdir(parents=True)
    monkeypatch.setattr(versions, "Worker", Clock)
    argv = ["versions.py", str(tmp_path), "--sizes", "tiny", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", argv)

    assert versions.main() == 0

    rows = capsys.readouterr().out.splitlines()[-len(TASKS) :]
    assert rows == [f"| tiny | {task} | 1.000 | 2.000 | 2.00 |" for task in TASKS]
    # Two rounds of both come before the one that counts.
    assert len(runs) == 2 * 3 * len(TASKS)


def test_worker_imports_its_checkout(tmp_path):
    package = tmp_path / "src" / "vanilla_transformer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit(7)")

    process = Worker(tmp_path, "tiny").process
    process.communicate()

    assert process.returncode == 7
