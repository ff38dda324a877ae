"""Trains a model of one's own sizes from scratch, whose attention heads talk to each other.

Talking heads (Shazeer et al. 2020, arXiv 2003.02436) mix the score maps of all heads by a learned
matrix before the softmax, and their attention weights after it. Example:

    python examples/talking_heads.py --output_dir runs/talking \
        --train train.de train.en --validation valid.de valid.en
"""

import torch
from datasets import Dataset, load_dataset
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)

LIMITS = {"max_length": 128, "truncation": True}


def load_pairs(files: list[str], tokenizer: VanillaTransformerTokenizer) -> Dataset:
    """Token ids of two text files, plain or gzipped, with one sentence per line."""
    sources, targets = (load_dataset("text", data_files=f, split="train")["text"][:] for f in files)
    return Dataset.from_dict(dict(tokenizer(sources, text_target=targets, **LIMITS)))


def build_model(vocab_size: int) -> VanillaTransformerForConditionalGeneration:
    """A small model with 4 attention maps, each of them mixed from 8 heads of queries and keys."""
    config = VanillaTransformerConfig(
        vocab_size=vocab_size,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        talking_heads="both",
        key_heads=8,
        dropout=0.1,
        label_smoothing=0.1,
    )
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.update(num_beams=4, max_length=LIMITS["max_length"])
    return model


def main() -> None:
    """Learns a vocabulary, trains with a validation loss after each epoch, and saves."""
    parser = HfArgumentParser(Seq2SeqTrainingArguments)
    for name in ("train", "validation"):
        parser.add_argument(f"--{name}", nargs=2, required=True, metavar=("SOURCES", "TARGETS"))
    parser.add_argument("--vocab_size", type=int, default=8000, help="Of both sides together.")
    parser.set_defaults(
        learning_rate=2e-3,
        warmup_steps=400,
        per_device_train_batch_size=128,
        train_sampling_strategy="group_by_length",
        num_train_epochs=30,
        eval_strategy="epoch",
        # Without this, processes on a CPU would train without each other.
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    training, given = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = VanillaTransformerTokenizer.train(files=given.train, vocab_size=given.vocab_size)
    train = load_pairs(given.train, tokenizer)
    validation = load_pairs(given.validation, tokenizer)
    trainer = Seq2SeqTrainer(
        model=build_model(len(tokenizer)),
        args=training,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
