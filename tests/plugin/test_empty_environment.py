"""What works right after `pip install -e .`, with nothing that only the tests need."""

import os
import subprocess
from pathlib import Path

import pytest

from ..support.environments import build_environment

SCRIPT = Path(__file__).parents[2] / "checks/empty_environment.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_package_trains_and_generates_in_an_empty_environment(tmp_path):
    for extra, arguments in {"": [], "[peft]": ["peft"]}.items():
        environment = tmp_path / f"environment{extra}"
        python = build_environment(environment, [f"vanilla-transformer{extra}"])
        finished = subprocess.run(
            [python, SCRIPT, tmp_path, *arguments],
            env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
