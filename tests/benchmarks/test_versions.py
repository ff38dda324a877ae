"""`benchmarks/versions.py`: this checkout against another one, not the reverse."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..support.documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from versions import TASKS, Worker, table_row

SCRIPT = ROOT / "benchmarks" / "versions.py"


def test_row_divides_our_median_by_the_others():
    cells = table_row("tiny", "greedy", other=[1.0, 2.0, 9.0], this=[3.0, 3.0, 0.5])

    assert cells == "| tiny | greedy | 2.000 | 3.000 | 1.50 |"


def test_folder_that_is_no_checkout_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "must be a checkout with src/vanilla_transformer" in done.stderr


@pytest.mark.slow
def test_worker_runs_the_code_of_its_checkout(tmp_path):
    package = tmp_path / "src" / "vanilla_transformer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('of the other checkout')")

    broken, whole = Worker(tmp_path, "tiny"), Worker(Path(ROOT), "tiny")

    assert broken.process.wait() == 1
    assert all(whole.run(task) > 0 for task in TASKS)
    whole.process.communicate()
