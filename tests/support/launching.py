"""Starts a helper script of the tests in two processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def launch(script: str, *arguments: str | Path, launcher: Sequence[str] = TORCHRUN) -> None:
    """Runs a script to its end, one thread for each process."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
