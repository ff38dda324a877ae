"""Runs of the training command on number words: settings for a minute model, and what they left."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.options import recipe

SIZES = [
    "d_model=32",
    "encoder_layers=1",
    "decoder_layers=1",
    "encoder_attention_heads=2",
    "decoder_attention_heads=2",
    "encoder_ffn_dim=64",
    "decoder_ffn_dim=64",
    "dropout=0.1",
]


def build_settings(corpus: Path, *, validated: bool = True, **changes: Any) -> TrainSettings:
    """Settings of a run that takes a few hundredths of a second an epoch."""

    def pair(split: str) -> list[str]:
        return [str(corpus / f"{split}.{language}") for language in ("de", "en")]

    given = {"config": SIZES, "vocab_size": 320, "max_tokens_per_batch": 800} | changes
    return TrainSettings(
        train=pair("train"), validation=pair("validation") if validated else [], **given
    )


def build_arguments(
    settings: TrainSettings, folder: Path, **changes: Any
) -> Seq2SeqTrainingArguments:
    """The recipe, but quick to learn, in float32 and without a progress bar."""
    given = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 30,
        "logging_steps": 5,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    return Seq2SeqTrainingArguments(**recipe(settings) | given | changes)


def run_training(
    corpus: Path, folder: Path, settings: dict[str, Any] | None = None, **arguments: Any
) -> Path:
    """Trains into a folder, with changed settings and arguments."""
    # Most tests that import this file do not train.
    from vanilla_transformer_tools.training.run import train

    changed = build_settings(corpus, **settings or {})
    return train(changed, build_arguments(changed, folder, **arguments), given=["bf16"])


def training_options(corpus: Path, *sizes: str) -> list[Any]:
    """Options of the `train` command for such a run in float32; `sizes` change `SIZES`."""
    pair = [corpus / f"train.{language}" for language in ("de", "en")]
    options = ["--train", *pair, "--config", *SIZES, *sizes, "--vocab_size", "320"]
    options += ["--max_tokens_per_batch", "800", "--learning_rate", "0.01", "--warmup_steps", "30"]
    return [*options, "--use_cpu", "--bf16", "false", "--disable_tqdm", "true"]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(folder: Path, other: Path) -> None:
    torch.testing.assert_close(weights_of(folder), weights_of(other), rtol=0, atol=0)


def checkpoints_of(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def flip_bit(file: Path) -> None:
    """Changes the last number in a file of weights."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
