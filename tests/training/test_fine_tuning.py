"""What a run trains of a saved model: all but what is frozen."""

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.start import choose_parameters

from ..models import Model
from ..support.training_runs import assert_same_weights, read_json, run_training, weights_of


def trained(model: Model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.fixture
def freeze(tiny_config):
    """Freezes parts of a tiny model; returns the names of what it still trains."""

    def freeze(*patterns: str, **changes: object) -> set[str]:
        for name, value in changes.items():
            setattr(tiny_config, name, value)
        model = Model(tiny_config)
        choose_parameters(model, TrainSettings(freeze=list(patterns)))
        return trained(model)

    return freeze


TWO_TABLES = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
LEARNED = {**TWO_TABLES, "position_embedding_type": "learned"}


@pytest.mark.parametrize(
    ("patterns", "changes", "frozen", "trained"),
    [
        # Not the table that the encoder shares.
        (["encoder"], {}, "model.encoder.*", "model.shared.weight"),
        (["decoder"], TWO_TABLES, "model.decoder.layer*", "model.decoder.embed_tokens.weight"),
        (["embeddings"], LEARNED, "*embed*", "lm_head.weight"),
        (["*.layers.0.*", "*.bias"], {}, "*.bias", "model.encoder.layers.1.fc1.weight"),
    ],
)
def test_parts_are_frozen_and_the_rest_is_trained(freeze, patterns, changes, frozen, trained):
    left = freeze(*patterns, **changes)

    assert not fnmatch.filter(left, frozen)
    assert trained in left


@pytest.mark.parametrize("name", ["embeddings", "lm_head.weight"])
def test_tied_matrix_is_frozen_by_any_of_its_names(freeze, name):
    assert "model.shared.weight" not in freeze(name)


def test_patterns_that_match_nothing_or_everything_are_refused(freeze):
    with pytest.raises(ValueError, match=r"'heads' matches no parameter") as caught:
        freeze("heads", "encoder", "layers.9*")
    with pytest.raises(ValueError, match=r"something to train, got \*, which match all \d+"):
        freeze("*")

    faults = str(caught.value).splitlines()
    assert len(faults) == 2
    assert all("such as lm_head.weight, model." in fault for fault in faults)


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model that was never trained."""
    folder = tmp_path_factory.mktemp("base")
    return run_training(corpus, folder, {"validated": False}, max_steps=1, learning_rate=0.0)


def fine_tune(
    corpus: Path,
    base: Path,
    folder: Path,
    *,
    updates: int = 3,
    arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    settings = {"validated": False, "config": [], "init_from": str(base)} | changes
    run_training(corpus, folder, settings, max_steps=updates, **arguments or {})


def test_weights_in_half_precision_are_trained_in_float32(corpus, base, tmp_path):
    half = shutil.copytree(base, tmp_path / "half", ignore=shutil.ignore_patterns("run.json"))
    AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)

    fine_tune(corpus, half, tmp_path / "run", updates=1)

    assert {weight.dtype for weight in weights_of(half).values()} == {torch.bfloat16}
    assert {weight.dtype for weight in weights_of(tmp_path / "run").values()} == {torch.float32}


def test_frozen_weights_stay_the_same_to_the_last_bit(corpus, base, tmp_path, capsys):
    fine_tune(
        corpus, base, tmp_path, validated=True, freeze=["embeddings", "encoder"], moving_average=0.5
    )

    before, after = weights_of(base), weights_of(tmp_path)
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    expected = {name for name in before if name.startswith(("model.encoder.", "model.shared."))}
    assert frozen == expected
    averaged = load_file(next(tmp_path.glob("checkpoint-*")) / "moving_average.safetensors")
    assert averaged.keys() == before.keys() - frozen
    count = sum(before[name].numel() for name in averaged)
    run = read_json(tmp_path / "run.json")
    total = sum(weight.numel() for weight in before.values())
    assert (run["parameters"], run["trained_parameters"]) == (total, count)
    assert (
        f"parameters  {total:,}, of which {count:,} are trained, vocab" in capsys.readouterr().out
    )


def test_resumed_run_ends_with_the_weights_of_one_in_one_go(corpus, base, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    fine_tune(corpus, base, whole, updates=4)
    fine_tune(corpus, base, resumed, updates=2)

    fine_tune(corpus, base, resumed, updates=4, resume=True)

    assert_same_weights(resumed, whole)


def test_model_that_training_only_spoils_stays_as_it_was(corpus, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    run_training(corpus, base, {"max_validation_pairs": 4}, num_train_epochs=2)
    spoiling = {"learning_rate": 0.9, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    given = {"validated": True, "max_validation_pairs": 4, "average_last": 2}

    fine_tune(corpus, base, run, updates=2, arguments=spoiling, **given)
    fine_tune(corpus, base, run, updates=3, arguments=spoiling, resume=True, **given)

    record = read_json(run / "run.json")
    assert (record["updates"], record["weights"]) == (3, "start, which no update made better")
    for name, weight in weights_of(base).items():
        torch.testing.assert_close(weights_of(run)[name], weight)
    scores = read_json(run / "results.json")["validation"]
    assert scores["loss"] == pytest.approx(read_json(base / "results.json")["validation"]["loss"])
