"""The training command in two processes, the second of which is lost after the first update.

Usage: lose_a_process.py FOLDER killed|silent

The folder must hold what `gradients_of_one_update.write_corpus` writes. It then holds `status-0`,
the status with which the first process ends.
"""

import os
import signal
import sys
import time
from pathlib import Path

from vanilla_transformer_tools.commands.command import run
from vanilla_transformer_tools.commands.train import train
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

OPTIONS = """--config d_model=16 encoder_layers=1 decoder_layers=1 --tokenizer_kind word
--max_tokens_per_batch 50 --max_steps 1000 --use_cpu --bf16 false --save_strategy no
--disable_tqdm true"""


def be_lost(how: str, status: Path) -> None:
    """Dies, or keeps the first process waiting for as long as it lives."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while not status.exists():
        time.sleep(0.1)


def main() -> None:
    """Trains until a process is lost."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    status, is_first = folder / "status-0", os.environ["RANK"] == "0"
    if not is_first:
        TokenBatchTrainer.check_losses = lambda trainer: be_lost(how, status)
    options = [*OPTIONS.split(), "--ddp_timeout", "5" if how == "silent" else "60"]
    files = [str(folder / name) for name in ("source", "target")]
    try:
        run(train, [*options, "--train", *files, "--output_dir", str(folder / "run")])
    except SystemExit as end:
        if is_first:
            status.write_text(str(end.code))
        raise


if __name__ == "__main__":
    main()
