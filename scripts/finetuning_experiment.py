#!/usr/bin/env python
"""Does fine-tuning pay? A parent of another class, brought in and fine-tuned on 5,000 pairs.

1. Transformers alone trains an M2M100 model of size `tiny` on the pairs of --parent.
2. `vanilla-transformer import` brings it in.
3. `vanilla-transformer train` makes three models from the first 5,000 pairs of --child: from
   scratch, fine-tuned, and with LoRA. The best checkpoint is chosen on --validation.
4. `vanilla-transformer evaluate` scores these and the imported model on --test.

What has been finished is kept, so an interrupted experiment can be started again.
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

from ablation import train

SIZES = {
    "d_model": 128,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
# <s> <pad> </s> <unk> have the ids that M2M100's config expects.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
# Name, row of the table, options of `train`. All other options are equal.
LEGS = {
    "scratch": (
        "from scratch",
        ["--config", "dropout=0.1", "--vocab_size", "4000", "--learning_rate", "3e-3"],
    ),
    "tuned": ("fine-tuned", ["--learning_rate", "2e-3"]),
    "lora": (
        "fine-tuned with LoRA, rank 16",
        ["--peft", "lora", "--learning_rate", "5e-3"],
    ),
}


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="Example:\n  python scripts/finetuning_experiment.py runs/finetuning \\\n"
        "      --parent tatoeba_de_en/train.{de,en}.gz --child multi30k/train.{de,en}.gz \\\n"
        "      --validation multi30k/val.{de,en}.gz --test multi30k/test_2016_flickr.{de,en}.gz",
    )
    parser.add_argument("folder", type=Path, help="Folder of the models.")
    for name in ("parent", "child", "validation", "test"):
        parser.add_argument(f"--{name}", nargs=2, required=True, help="Source and target, .gz.")
    parser.add_argument("--pairs", type=int, default=5000, help="Of --child (default: 5000).")
    parser.add_argument(
        "--minutes",
        type=float,
        nargs=2,
        default=(12, 4),
        metavar=("PARENT", "LEG"),
        help="Of training for the parent and for each of its children (default: 12 4).",
    )
    return parser.parse_args()


def main() -> int:
    """Runs what has not been run yet, and prints a table; returns the exit status."""
    options = parse()
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """The four steps of the experiment."""
    folder, (minutes, minutes_of_a_leg) = options.folder, options.minutes
    # Imported late: they load torch, and `--help` should answer at once.
    from vanilla_transformer_tools.commands import main as command
    from vanilla_transformer_tools.files import write_lines

    parent, imported = folder / "parent", folder / "imported"
    if not (parent / "config.json").exists():
        train_parent(parent, read_sides(options.parent), minutes)
    if not imported.exists():
        command(["import", str(parent), str(imported)])
    few = [folder / f"few.{side}" for side in ("source", "target")]
    for file, side in zip(few, read_sides(options.child, options.pairs), strict=True):
        write_lines(file, side)
    common = ["--train", *map(str, few), "--validation", *options.validation]
    common += ["--max_validation_pairs", "300", "--max_tokens_per_batch", "2048"]
    common += ["--warmup_steps", "200", "--max_minutes", str(minutes_of_a_leg)]
    # The deadline ends the training.
    common += ["--num_train_epochs", "1000", "--disable_tqdm", "True"]
    for name, (_, given) in LEGS.items():
        start = [] if name == "scratch" else ["--init_from", str(imported)]
        if status := train(folder / name, [*common, *start, *given]):
            raise ValueError(f"The training of {name} ended with status {status}.")
    rows = {"imported": "imported, before fine-tuning"}
    rows |= {name: title for name, (title, _) in LEGS.items()}
    for name in rows:
        command(["evaluate", "--model", str(folder / name), "--test", *options.test])
    print_table({title: folder / name for name, title in rows.items()})


def read_sides(paths: list[str], first: int | None = None) -> list[list[str]]:
    """Sources and targets of all pairs, or of the first ones.

    Raises:
        ValueError: If the files do not have the same number of lines, or one is no text.
        OSError: If one cannot be read.
    """
    from vanilla_transformer_tools.text.parallel_text import ParallelText, read_pairs

    pairs = islice(read_pairs(ParallelText(tuple(paths))), first)
    return [list(side) for side in zip(*pairs, strict=True)]


def train_parent(folder: Path, sides: list[list[str]], minutes: float) -> None:
    """Trains an M2M100 model and its tokenizer with Transformers, and with nothing of ours."""
    from datasets import Dataset
    from transformers import (
        DataCollatorForSeq2Seq,
        M2M100Config,
        M2M100ForConditionalGeneration,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    class Deadline(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = time.monotonic() > end

    tokenizer = train_tokenizer([line for side in sides for line in side])
    encoded = [tokenizer(side, truncation=True, max_length=64)["input_ids"] for side in sides]
    pairs = Dataset.from_dict(dict(zip(("input_ids", "labels"), encoded, strict=True)))
    config = M2M100Config(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=256)
    model = M2M100ForConditionalGeneration(config)
    model.generation_config.update(num_beams=4, length_penalty=0.6, max_length=128)
    arguments = Seq2SeqTrainingArguments(
        str(folder),
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
    end = time.monotonic() + 60 * minutes
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        train_dataset=pairs,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
        callbacks=[Deadline()],
    )
    trainer.train()
    trainer.save_model()


def train_tokenizer(texts: list[str]):
    """BPE on bytes with 8,000 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=8000,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    end = "</s>"
    bpe.post_processor = processors.TemplateProcessing(
        f"$A {end}", special_tokens=[(end, bpe.token_to_id(end))]
    )
    names = ("bos_token", "pad_token", "eos_token", "unk_token")
    special = dict(zip(names, SPECIAL_TOKENS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def print_table(models: dict[str, Path]) -> None:
    """Prints a row of scores for each model, and the signatures below."""
    results = {title: read_scores(folder) for title, folder in models.items()}
    print("| model | BLEU | chrF | trained parameters | updates |\n" + "| --- " * 5 + "|")
    for title, folder in models.items():
        scores = results[title]
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        cells = [title, f"{scores['bleu']:.2f}", f"{scores['chrf']:.2f}"]
        cells += [f"{run.get(name, 0):,}" for name in ("trained_parameters", "updates")]
        print(f"| {' | '.join(cells)} |")
    for metric in ("bleu", "chrf"):
        print(f"{metric}: {scores[f'{metric}_signature']}")


def read_scores(folder: Path) -> dict[str, object]:
    """What `evaluate` stored beside a model."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["test"]


if __name__ == "__main__":
    sys.exit(main())
