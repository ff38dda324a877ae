"""A few sentences, a model that is small enough for them, and how the scripts are run."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import evaluate
import pytest
import torch

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)

# Unequal lengths: batches of similar ones are not in the order of the file.
SENTENCES = [
    ("ein hund", "a dog"),
    ("die kleine katze schläft auf dem alten sofa", "the little cat sleeps on the old sofa"),
    ("ein mann liest", "a man reads"),
    ("zwei kinder spielen im garten mit einem ball", "two children play with a ball in the garden"),
    ("es regnet", "it rains"),
    ("die frau kauft heute brot", "the woman buys bread today"),
    ("wir gehen", "we go"),
    ("der alte mann fährt mit dem rad zur arbeit", "the old man rides his bike to work"),
]
SOURCES, TARGETS = (list(side) for side in zip(*SENTENCES, strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `train.de`, `train.en` and an untrained `model`."""
    folder = tmp_path_factory.mktemp("place")
    for language, lines in {"de": SOURCES, "en": TARGETS}.items():
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"train.{language}").write_text(text, encoding="utf-8")
    tokenizer = VanillaTransformerTokenizer.train([*SOURCES, *TARGETS], vocab_size=330)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        dropout=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.max_length = 48
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches are the test's own, and the seeds of a script are not those of later tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "metrics"))
    with torch.random.fork_rng():
        yield


def pairs_of(place: Path) -> list[str]:
    """Options that name the sentences, for training and for validation."""
    files = [str(place / f"train.{language}") for language in ("de", "en")]
    return ["--train", *files, "--validation", *files]
