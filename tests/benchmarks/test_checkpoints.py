"""`benchmarks/checkpoints.py`: ours against Trainer's, not the reverse."""

import sys
import time
from pathlib import Path

from transformers import Seq2SeqTrainer

from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from checkpoints import measure, table


def test_table_divides_our_median_by_trainers():
    lines = table("tiny", trainers=[1.0, 2.0, 9.0], ours=[3.0, 3.0, 0.5]).splitlines()

    assert lines[0] == "| preset | Trainer, s | ours, s | ours / Trainer |"
    assert lines[2] == "| tiny | 2.00 | 3.00 | 1.50 |"


def test_each_is_timed_under_its_own_name(monkeypatch):
    seen = []

    def save(trainer, *_):
        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        folder.mkdir()
        seen.append(len(list(folder.parent.glob("*/*"))))
        (folder / "weights").touch()

    def save_slowly(trainer, *_):
        save(trainer)
        time.sleep(0.2)

    monkeypatch.setattr(Seq2SeqTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(TokenBatchTrainer, "_save_checkpoint", save_slowly)

    seconds = measure("tiny", vocab_size=300, rounds=2)

    assert min(seconds["ours"]) > 0.2 > max(seconds["trainers"])
    # Nothing of another checkpoint is on the disk.
    assert seen == [0] * 4
