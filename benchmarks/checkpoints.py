#!/usr/bin/env python
"""How long a checkpoint takes that is closed by a list of checksums, against Trainer's own."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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
    ours, trainers = measure(arguments.preset, arguments.vocab_size, arguments.rounds)
    print(
        "| preset | Trainer, s | ours, s | ours / Trainer |\n| --- | --- | --- | --- |\n"
        f"| {arguments.preset} | {trainers:.2f} | {ours:.2f} | {ours / trainers:.2f} |"
    )


def measure(preset: str, vocab_size: int, rounds: int) -> tuple[float, float]:
    """Seconds for a checkpoint of ours and of Trainer."""
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer import (
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerTokenizer,
    )
    from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair
    from vanilla_transformer.training.trainer import TokenBatchTrainer
    from vanilla_transformer_cli.settings import PRESETS

    disable_progress_bar()
    config = VanillaTransformerConfig(**PRESETS[preset].config(), vocab_size=vocab_size)
    tokenizer = VanillaTransformerTokenizer.train(["a b"], vocab_size=262)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TokenBatchTrainer(
            None,
            TokenizerPair.joint(tokenizer),
            model=VanillaTransformerForConditionalGeneration(config),
            args=Seq2SeqTrainingArguments(output_dir=folder, use_cpu=True, report_to="none"),
        )
        trainer.create_optimizer_and_scheduler(num_training_steps=10)
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizer.step()
        ways: dict[str, Callable[[], None]] = {
            "trainers": lambda: Seq2SeqTrainer._save_checkpoint(trainer, trainer.model, None),
            "ours": lambda: trainer._save_checkpoint(trainer.model, None),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(2 * rounds):
            name = list(ways)[number % 2]
            trainer.state.global_step = number
            started = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - started)
            for file in sorted(Path(folder).glob("checkpoint-*/*")):
                file.unlink()
    return statistics.median(seconds["ours"]), statistics.median(seconds["trainers"])


if __name__ == "__main__":
    main()
