"""Distils a model into a smaller one: word-level distillation (Kim and Rush 2016, section 3.1)."""

from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

import vanilla_transformer  # noqa: F401  (registers the model with the Auto classes)

LIMITS = {"max_length": 128, "truncation": True}
SMALLER = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0.1}


class DistillationTrainer(Seq2SeqTrainer):
    """Half of the loss is the student's own, the other half its divergence from the teacher."""

    def __init__(self, *args: Any, teacher: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's in an evaluation; in training, Trainer wants the loss alone."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = {**inputs, "return_logits": True}
        own, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        is_target = inputs["labels"] != -100
        with torch.no_grad():
            taught = self.teacher(**inputs).logits[is_target].log_softmax(-1)
        learned = outputs.logits[is_target].log_softmax(-1)
        divergence = torch.nn.functional.kl_div(learned, taught, reduction="sum", log_target=True)
        # The divisor counts the targets of all processes, whose gradients will be averaged.
        return (own + divergence / num_items_in_batch * self.accelerator.num_processes) / 2


def load_pairs(files: list[str], tokenizer: Any) -> Dataset:
    """Token ids of two text files, plain or gzipped, with one sentence per line."""
    sources, targets = (load_dataset("text", data_files=f, split="train")["text"][:] for f in files)
    return Dataset.from_dict(dict(tokenizer(sources, text_target=targets, **LIMITS)))


def main() -> None:
    """Trains a student with a validation loss after each epoch, and saves it."""
    parser = HfArgumentParser(Seq2SeqTrainingArguments)
    for name, count in {"teacher": None, "train": 2, "validation": 2}.items():
        parser.add_argument(f"--{name}", nargs=count, required=True)
    parser.set_defaults(
        learning_rate=2e-3,
        warmup_steps=400,
        num_train_epochs=10,
        per_device_train_batch_size=128,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        # Without this, processes on a CPU would train without each other.
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    training, given = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.teacher)
    teacher = AutoModelForSeq2SeqLM.from_pretrained(given.teacher)
    config = AutoConfig.from_pretrained(given.teacher, **SMALLER)
    student = AutoModelForSeq2SeqLM.from_config(config)
    student.generation_config = teacher.generation_config
    print(f"teacher {teacher.num_parameters():,} parameters, student {student.num_parameters():,}")
    train = load_pairs(given.train, tokenizer)
    validation = load_pairs(given.validation, tokenizer)
    trainer = DistillationTrainer(
        model=student,
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        teacher=teacher,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
