#!/usr/bin/env python
"""Time to save a checkpoint with its list of checksums, against Trainer's own checkpoint."""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

from ratio_tables import head, ratio, row
from rounds import take_turns

EPILOG = """Both save the same model, optimizer and schedule, in turn, each round into an empty
folder; times are medians.

example:
  python benchmarks/checkpoints.py --preset base --rounds 9
"""


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="base", choices=("tiny", "small", "base", "big"))
    parser.add_argument("--vocab_size", type=int, default=37_000, help="Default: 37000.")
    parser.add_argument("--rounds", type=int, default=9, help="Default: 9.")
    arguments = parser.parse_args()
    seconds = measure(arguments.preset, arguments.vocab_size, arguments.rounds)
    print(table(arguments.preset, **seconds))


def table(preset: str, trainers: list[float], ours: list[float]) -> str:
    """Median seconds of both, and ours as a multiple of Trainer's."""
    cells = (f"{median(trainers):.2f}", f"{median(ours):.2f}", ratio(ours, trainers))
    return f"{head('preset', 'Trainer, s', 'ours, s', 'ours / Trainer')}\n{row(preset, *cells)}"


def measure(preset: str, vocab_size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round for a checkpoint of Trainer and for one of ours."""
    import torch
    from datasets import Dataset
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer import (
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerTokenizer,
    )
    from vanilla_transformer_tools.settings import PRESETS
    from vanilla_transformer_tools.text.batches import TokenBatchSampler
    from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
    from vanilla_transformer_tools.text.training_data import in_epochs
    from vanilla_transformer_tools.training.trainer import TokenBatchTrainer

    disable_progress_bar()
    config = VanillaTransformerConfig(**PRESETS[preset].config(), vocab_size=vocab_size)
    tokenizer = VanillaTransformerTokenizer.train(["a b"], vocab_size=262)
    with tempfile.TemporaryDirectory() as folder:
        sampler = TokenBatchSampler([(1, 1)], max_tokens=2, seed=0)
        trainer = TokenBatchTrainer(
            in_epochs(Dataset.from_dict({"input_ids": [[2]], "labels": [[2]]}), sampler, 0),
            TokenizerPair.joint(tokenizer),
            model=VanillaTransformerForConditionalGeneration(config),
            args=Seq2SeqTrainingArguments(output_dir=folder, use_cpu=True, report_to="none"),
        )
        trainer.create_optimizer_and_scheduler(num_training_steps=10)
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.step()
        trainer_saves = partial(Seq2SeqTrainer._save_checkpoint, trainer)
        updates = count()

        def save(saves: Callable[..., None]) -> float:
            trainer.state.global_step = next(updates)
            started = time.perf_counter()
            saves(trainer.model, None)
            seconds = time.perf_counter() - started
            for file in Path(folder).glob("checkpoint-*/*"):
                file.unlink()
            return seconds

        ways = {"trainers": trainer_saves, "ours": trainer._save_checkpoint}
        return take_turns({name: partial(save, way) for name, way in ways.items()}, rounds)


if __name__ == "__main__":
    main()
