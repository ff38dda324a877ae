"""What a new user does first, where nothing but this package is installed: `... FOLDER [peft]`.

Trains, evaluates and translates with the commands of the README, for two updates; generates in
every mode; trains with `Seq2SeqTrainer` and `predict_with_generate`. `peft` trains an adapter.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import vanilla_transformer  # noqa: F401  (registers the classes)
from saved_folders.save import results

SOURCES = ["eins zwei drei", "vier fünf sechs sieben", "acht neun", "zehn elf zwölf"] * 8
TARGETS = ["one two three", "four five six seven", "eight nine", "ten eleven twelve"] * 8


def main() -> None:
    """Fails where something does not work."""
    folder, *extras = sys.argv[1:]
    model_folder = Path(folder) / "model"
    if "peft" in extras:
        adapt(model_folder)
        return
    run_commands(Path(folder), model_folder)
    model, tokenizer = load(model_folder)
    found = results(model, tokenizer)
    faults = {mode: result for mode, result in found.items() if isinstance(result, str)}
    assert not faults, faults
    train(model, tokenizer, Path(folder) / "trainer")


def run_commands(folder: Path, model_folder: Path) -> None:
    """`train`, `evaluate` and `translate`."""
    pair = (folder / "train.de", folder / "train.en")
    for file, lines in zip(pair, (SOURCES, TARGETS), strict=True):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sides = [str(file) for file in pair]
    sizes = ["encoder_layers=1", "decoder_layers=1", "d_model=16", "encoder_attention_heads=2"]
    sizes += ["decoder_attention_heads=2", "encoder_ffn_dim=16", "decoder_ffn_dim=16"]
    command(
        *("train", "--train", *sides, "--validation", *sides, "--output_dir", str(model_folder)),
        *("--config", *sizes, "--vocab_size", "300", "--max_steps", "2"),
    )
    command("evaluate", "--model", str(model_folder), "--test", *sides)
    command("translate", "--model", str(model_folder), "eins zwei")


def command(*arguments: str) -> None:
    """Runs `vanilla-transformer`, which must succeed."""
    code = "from vanilla_transformer_tools.commands import main; main()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def train(model: Any, tokenizer: Any, folder: Path) -> None:
    """One update, and an evaluation of what is generated."""
    encoded = tokenizer(SOURCES, text_target=TARGETS)
    pairs: Any = [
        {name: encoded[name][row] for name in ("input_ids", "attention_mask", "labels")}
        for row in range(8)
    ]
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            str(folder),
            predict_with_generate=True,
            generation_max_length=9,
            max_steps=1,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=pairs,
        eval_dataset=pairs,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    trainer.train()
    predicted: Any = trainer.predict(pairs).predictions
    assert predicted.shape[0] == len(pairs), predicted.shape


def adapt(model_folder: Path) -> None:
    """Trains a LoRA adapter for one update."""
    from peft import LoraConfig, TaskType, get_peft_model

    model, tokenizer = load(model_folder)
    adapter = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, target_modules=["fc1", "fc2"])
    train(get_peft_model(model, adapter), tokenizer, model_folder.with_name("adapter"))


if __name__ == "__main__":
    main()
