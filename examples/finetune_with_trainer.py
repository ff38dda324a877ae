"""Fine-tunes a saved model on pairs of lines, with `Seq2SeqTrainer`.

Every field of `Seq2SeqTrainingArguments` is an option. Example:

    python examples/finetune_with_trainer.py --model runs/demo --output_dir runs/mine \
        --train train.de train.en --validation valid.de valid.en --num_train_epochs 5
"""

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import vanilla_transformer  # noqa: F401  (registers the model with the Auto classes)
from vanilla_transformer_tools.evaluation.training_scores import compute_scores

LIMITS = {"max_length": 128, "truncation": True}


def load_pairs(files: list[str], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Token ids of two text files, plain or gzipped, with one sentence per line."""
    sources, targets = (load_dataset("text", data_files=f, split="train")["text"][:] for f in files)
    return Dataset.from_dict(dict(tokenizer(sources, text_target=targets, **LIMITS)))


def main() -> None:
    """Trains, and saves the epoch with the best chrF."""
    parser = HfArgumentParser(Seq2SeqTrainingArguments)
    parser.add_argument("--model", required=True, help="Folder or Hub name to start from.")
    for name in ("train", "validation"):
        parser.add_argument(f"--{name}", nargs=2, required=True, metavar=("SOURCES", "TARGETS"))
    parser.set_defaults(
        learning_rate=3e-4,
        warmup_steps=100,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="chrf",
        predict_with_generate=True,
        generation_num_beams=1,
        # Without this, processes on a CPU would train without each other.
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    training, given = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    train = load_pairs(given.train, tokenizer)
    validation = load_pairs(given.validation, tokenizer)

    trainer = Seq2SeqTrainer(
        model=AutoModelForSeq2SeqLM.from_pretrained(given.model),
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_scores(tokenizer),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    # Without this, a process that leaves right after an exchange can hang.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
