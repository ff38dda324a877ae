"""The training command in two processes, the second of which is lost after the first update.

Usage: lose_a_process.py FOLDER killed|silent [OPTION ...]

The folder then holds `status-0`, the status with which the first process ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

from vanilla_transformer_tools.commands.command import run
from vanilla_transformer_tools.commands.train import train
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer


def be_lost(how: str, status: Path) -> None:
    """Dies, or keeps the first process waiting for as long as it lives."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while not status.exists():
        time.sleep(0.1)


def main() -> None:
    """Trains until a process is lost."""
    folder, (how, *options) = Path(sys.argv[1]), sys.argv[2:]
    status, is_first = folder / "status-0", os.environ["RANK"] == "0"
    if not is_first:
        TokenBatchTrainer.check_losses = lambda trainer: be_lost(how, status)
    options += ["--ddp_timeout", "5" if how == "silent" else "60"]
    try:
        run(train, [*options, "--output_dir", str(folder / "run")])
    except SystemExit as end:
        if is_first:
            status.write_text(str(end.code))
        raise


if __name__ == "__main__":
    main()
