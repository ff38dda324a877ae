"""Programs of the laboratory import what they need and show an example."""

import pytest

from ..support.documents import ROOT
from ..support.scripts import run_script

BENCHMARKS = "conversion finetuning generation growth peers plot_complexity processes threads"
BENCHMARKS += " training tricks versions"
LAB = "ablate compare_minutes score_by_length speedrun train_m2m100"
PROGRAMS = [f"benchmarks/{name}.py" for name in BENCHMARKS.split()]
PROGRAMS += [f"lab/{name}.py" for name in LAB.split()]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_shows_an_example(program):
    done = run_script(ROOT / program, "--help")

    assert done.returncode == 0, done.stderr
    assert f" {program} " in done.stdout
