"""Fine-tunes a saved model on pairs of lines, with accelerate and a loop of one's own."""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler

import vanilla_transformer  # noqa: F401  (registers the model with the Auto classes)
from vanilla_transformer_tools.evaluation.metrics import score

LIMITS = {"max_length": 128, "truncation": True}
NUMBERS = {"epochs": 5, "batch_size": 32, "gradient_accumulation_steps": 1}
NUMBERS |= {"learning_rate": 3e-4, "warmup_steps": 100, "seed": 42}


def load_pairs(files: list[str], tokenizer: Any) -> Dataset:
    """Token ids of two text files, plain or gzipped, with one sentence per line."""
    sources, targets = (load_dataset("text", data_files=f, split="train")["text"][:] for f in files)
    return Dataset.from_dict(dict(tokenizer(sources, text_target=targets, **LIMITS)))


def add_gradients(model: Any, batches: list[Any], accelerator: Accelerator) -> float:
    """Gradients of one update; returns its loss per target."""
    # The divisor of each loss: the targets of the update, in all its batches and processes.
    targets = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in batches))
    losses = []
    for batch in batches:
        # Processes exchange gradients once, after the last batch.
        with nullcontext() if batch is batches[-1] else accelerator.no_sync(model):
            losses.append(model(**batch, num_items_in_batch=targets).loss)
            # The exchange averages gradients over the processes; this makes it a sum.
            accelerator.backward(losses[-1] * accelerator.num_processes)
    return accelerator.reduce(sum(losses).detach()).item()


def translate(model: Any, loader: DataLoader, tokenizer: Any, accelerator: Accelerator) -> Iterator:
    """Translations of all sources, in their order, for each process."""
    for batch in loader:
        ids = accelerator.unwrap_model(model).generate(**batch, num_beams=1)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        yield from accelerator.gather_for_metrics(texts, use_gather_object=True)


def main() -> None:
    """Trains, with a score after each epoch, and saves model and tokenizer."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, count in {"model": None, "output_dir": None, "train": 2, "validation": 2}.items():
        parser.add_argument(f"--{name}", nargs=count, required=True)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    # Unless told so, processes on a CPU would train without each other.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.manual_seed(given.seed + accelerator.process_index)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(given.model)
    train = load_pairs(given.train, tokenizer)
    validation = load_pairs(given.validation, tokenizer)
    references = load_dataset("text", data_files=given.validation[1], split="train")["text"][:]
    collate = DataCollatorForSeq2Seq(tokenizer)
    model, optimizer, train_loader, validation_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=given.learning_rate),
        DataLoader(train, given.batch_size, shuffle=True, collate_fn=collate),
        DataLoader(validation.remove_columns("labels"), given.batch_size, collate_fn=collate),
    )
    updates = given.epochs * -(-len(train_loader) // given.gradient_accumulation_steps)
    schedule = get_scheduler("linear", optimizer, given.warmup_steps, updates)  # not prepared
    for epoch in range(1, given.epochs + 1):
        batches = iter(train_loader)
        while update := list(islice(batches, given.gradient_accumulation_steps)):
            loss = add_gradients(model.train(), update, accelerator)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        texts = translate(model.eval(), validation_loader, tokenizer, accelerator)
        scores = score(list(texts), references)
        accelerator.print(f"epoch {epoch}  last loss {loss:.3f}  chrF {scores['chrf']:.2f}")
    weights = accelerator.get_state_dict(model)  # all processes take part: FSDP divides them
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(given.output_dir, state_dict=weights)
        tokenizer.save_pretrained(given.output_dir)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
