#!/usr/bin/env python
"""Trains an M2M100 model of size `tiny` with Transformers alone, as a parent for fine-tuning.

Example:
  python lab/train_m2m100.py runs/parent --train train.de.gz train.en.gz --minutes 50
"""

import argparse
import time
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

SIZES = {"d_model": 128, "max_position_embeddings": 256} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 4, "attention_heads": 4, "ffn_dim": 256, "layerdrop": 0.0}.items()
}
# They have the ids that M2M100's config expects.
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def main() -> None:
    """Trains for the minutes, and saves model and tokenizer."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("folder", type=Path, help="Folder of the model.")
    parser.add_argument("--train", nargs=2, required=True, help="Source and target file.")
    parser.add_argument("--minutes", type=float, default=12.0, help="Of training (default: 12).")
    options = parser.parse_args()

    class Deadline(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = time.monotonic() > end

    sides = [load_dataset("text", data_files=f, split="train")["text"][:] for f in options.train]
    tokenizer = train_tokenizer([line for side in sides for line in side])
    pairs = tokenizer(sides[0], text_target=sides[1], truncation=True, max_length=64)
    model = M2M100ForConditionalGeneration(M2M100Config(**SIZES, vocab_size=len(tokenizer)))
    model.generation_config.update(num_beams=4, length_penalty=0.6, max_length=128)
    arguments = Seq2SeqTrainingArguments(
        str(options.folder),
        per_device_train_batch_size=96,
        train_sampling_strategy="group_by_length",
        learning_rate=2e-3,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=400,
        num_train_epochs=1000,
        save_strategy="no",
        report_to="none",
        logging_steps=100,
        use_cpu=True,
        disable_tqdm=True,
    )
    end = time.monotonic() + 60 * options.minutes
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict(dict(pairs)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
        callbacks=[Deadline()],
    )
    trainer.train()
    trainer.save_model()


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """BPE on bytes with 8,000 entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=[*SPECIAL.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)


if __name__ == "__main__":
    main()
