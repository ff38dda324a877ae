"""What several processes do together; `launch` starts it, tests also import it.

Usage: gradients_of_one_update.py FOLDER

The folder then holds, one for each process, `gradients-RANK.pt` and `updates-RANK.pt`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.schedule import Schedule

# Sentences of a batch, over all processes together, and batches of an update: 16 sentences each.
SPLITS = [(16, 1), (4, 4), (2, 8)]

# Smoothing that the config and Trainer's argument ask for; the argument wins.
SMOOTHINGS = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.2)]

# What two processes try: each split and each smoothing.
SHARED = list(zip([*SPLITS, SPLITS[1]], SMOOTHINGS, strict=True))

VOCAB_SIZE = 37

# In it no update depends on earlier ones, but through the parameters.
PLAIN_DESCENT: dict[str, Any] = {
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def ragged_pairs() -> Dataset:
    """Sixteen pairs; one target is longer than any eight others together.

    However the pairs are dealt out, two processes hold unequal numbers of target tokens.
    """
    generator = torch.Generator().manual_seed(3)

    def sentence(length: int) -> list[int]:
        return [*torch.randint(4, VOCAB_SIZE, (length - 1,), generator=generator).tolist(), 2]

    source_lengths = [2 + 5 * index % 9 for index in range(16)]
    target_lengths = [2 + 3 * index % 4 for index in range(15)] + [50]
    return Dataset.from_dict(
        {
            "input_ids": list(map(sentence, source_lengths)),
            "labels": list(map(sentence, target_lengths)),
        }
    )


def build_model(label_smoothing: float) -> VanillaTransformerForConditionalGeneration:
    """A small model without dropout, the same at every call."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig(
        vocab_size=VOCAB_SIZE,
        d_model=24,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=28,
        decoder_ffn_dim=36,
        dropout=0.0,
        label_smoothing=label_smoothing,
    )
    return VanillaTransformerForConditionalGeneration(config)


def build_collator(model: nn.Module) -> DataCollatorForSeq2Seq:
    """Transformers' collator; the tokenizer only lends it the padding id."""
    tokenizer = VanillaTransformerTokenizer.train(["a b"], kind="word", vocab_size=6)
    return DataCollatorForSeq2Seq(tokenizer, model=model)


def build_arguments(folder: Path, **changes: Any) -> Seq2SeqTrainingArguments:
    """Plain gradient descent on a CPU."""
    return Seq2SeqTrainingArguments(**PLAIN_DESCENT | changes | {"output_dir": str(folder)})


class KeepGradients(TrainerCallback):
    """Copies what the first update is made from."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        """Runs when all batches and processes have added their share."""
        self.gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad
        }


def gradients_of_one_update(
    folder: Path, split: tuple[int, int], smoothing: tuple[float, float]
) -> dict[str, Tensor]:
    """Gradients that the unmodified `Seq2SeqTrainer` takes from the sixteen pairs."""
    batch_size, accumulated = split
    by_model, by_trainer = smoothing
    arguments = build_arguments(
        folder,
        gradient_accumulation_steps=accumulated,
        label_smoothing_factor=by_trainer,
        max_steps=1,
    )
    arguments.per_device_train_batch_size = batch_size // arguments.world_size
    model = build_model(by_model)
    keeper = KeepGradients()
    Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=ragged_pairs(),
        data_collator=build_collator(model),
        callbacks=[keeper],
    ).train()
    return keeper.gradients


def updates_until_stop(folder: Path, stop: Schedule) -> int:
    """Number of updates that training makes until `stop` ends it."""
    model = build_model(label_smoothing=0.0)
    trainer = Seq2SeqTrainer(
        model=model,
        args=build_arguments(folder, max_steps=5, per_device_train_batch_size=1),
        train_dataset=ragged_pairs(),
        data_collator=build_collator(model),
        callbacks=[stop],
    )
    trainer.train()
    return trainer.state.global_step


def main() -> None:
    """Writes what the tests compare with a single process."""
    folder = Path(sys.argv[1])
    gradients = {
        (split, smoothing): gradients_of_one_update(folder, split, smoothing)
        for split, smoothing in SHARED
    }
    rank = torch.distributed.get_rank()
    torch.save(gradients, folder / f"gradients-{rank}.pt")
    # The signal of a Ctrl-C need not reach all processes, and their clocks differ.
    stop = Schedule(TrainSettings())
    stop.interrupted = rank == 1
    torch.save(updates_until_stop(folder, stop), folder / f"updates-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
