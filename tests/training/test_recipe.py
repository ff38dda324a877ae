"""Defaults of a run."""

import pytest
import torch

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training import recipe as module
from vanilla_transformer_tools.training.recipe import in_step, recipe
from vanilla_transformer_tools.training.starting_model import config_overrides

TRAINED = {"train": ["a.de", "a.en"]}
VALIDATED = {**TRAINED, "validation": ["b.de", "b.en"]}


@pytest.mark.parametrize(("settings", "limit"), [(TRAINED, 3), (VALIDATED, 4)])
def test_best_checkpoint_is_kept_beside_those_to_average(settings, limit):
    assert recipe(TrainSettings(**settings, average_last=3))["save_total_limit"] == limit
    assert recipe(TrainSettings(**settings))["save_total_limit"] == limit + 2
    # Trainer would take 0 for all.
    assert recipe(TrainSettings(**settings, average_last=0))["save_total_limit"] == 1


def test_fp16_takes_the_place_of_bf16():
    defaults = {"bf16": True, "learning_rate": 0.1}

    assert in_step(defaults, {"fp16": True}) == {"bf16": False, "learning_rate": 0.1}
    assert in_step(defaults, {"fp16": False}) == defaults


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
        ({"eval_steps": 7}, {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": 7}, {"save_strategy": "steps", "save_steps": 7}),
        ({"save_strategy": "steps"}, {"eval_strategy": "steps"}),
        ({"save_steps": 7, "eval_steps": 7}, {"eval_strategy": "steps", "save_strategy": "steps"}),
        ({"eval_strategy": "no"}, {"save_strategy": "epoch", "load_best_model_at_end": False}),
        ({"save_strategy": "no"}, {"eval_strategy": "epoch", "load_best_model_at_end": False}),
    ],
)
def test_each_evaluation_is_of_a_checkpoint_unless_there_are_none(given, expected):
    defaults = in_step(recipe(TrainSettings(**VALIDATED)), given)

    assert {"load_best_model_at_end": True} | expected == {
        name: defaults[name] for name in {"load_best_model_at_end", *expected}
    }


def test_validated_run_keeps_its_best_score():
    given = recipe(TrainSettings(**VALIDATED, metrics=["chrf", "bleu"]))

    assert given["metric_for_best_model"] == "chrf"
    assert (given["eval_strategy"], given["save_strategy"]) == ("epoch", "epoch")
    assert given["predict_with_generate"]
    assert given["load_best_model_at_end"]
    assert "eval_strategy" not in recipe(TrainSettings(**TRAINED))


@pytest.mark.parametrize("kind", [{"streaming": True}, {"minutes": 1.0}], ids=str)
def test_run_without_epochs_is_saved_and_scored_by_updates(kind):
    given = recipe(TrainSettings(**VALIDATED, **kind))

    assert (given["save_strategy"], given["eval_strategy"]) == ("steps", "steps")
    assert given["save_steps"] == given["eval_steps"]
    assert "eval_strategy" not in recipe(TrainSettings(**TRAINED, **kind))


# Config fields


def test_config_overrides_that_set_no_field_are_refused_all_at_once():
    config = ["d_model", "d_modle=64", "qqq=64", "vocab_size=64"]

    with pytest.raises(ValueError, match="--config") as caught:
        config_overrides(TrainSettings(config=config))

    assert str(caught.value).splitlines() == [
        "--config takes KEY=VALUE, got 'd_model'.",
        "--config: VanillaTransformerConfig has no field 'd_modle'. Did you mean d_model?",
        "--config: VanillaTransformerConfig has no field 'qqq'.",
        "--config vocab_size: use --vocab_size instead.",
    ]


def test_shared_table_is_refused_for_separate_vocabularies():
    table = "share_encoder_decoder_embeddings"
    assert config_overrides(TrainSettings(config=[f"{table}=true"])) == {table: True}

    with pytest.raises(ValueError, match=f"--config {table} must be false .* got true"):
        config_overrides(TrainSettings(config=[f"{table}=true"], separate_vocabularies=True))


def test_config_overrides_are_json_values_and_plain_strings():
    settings = TrainSettings(
        config=["d_model=64", "dropout=0.2", "scale_embedding=false", "activation_function=gelu"]
    )

    assert config_overrides(settings) == {
        "d_model": 64,
        "dropout": 0.2,
        "scale_embedding": False,
        "activation_function": "gelu",
    }


def test_defaults_of_a_gpu_are_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = recipe(TrainSettings(**TRAINED))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(module, "is_torch_tf32_available", lambda: True)

    on_gpu = recipe(TrainSettings(**TRAINED))

    names = ("dataloader_num_workers", "dataloader_pin_memory", "tf32")
    assert [on_cpu[name] for name in names] == [0, False, None]
    assert [on_gpu[name] for name in names] == [2, True, True]
    assert recipe(TrainSettings(**TRAINED, streaming=True))["dataloader_num_workers"] == 1
    assert on_gpu["bf16"]
    assert not on_gpu["logging_nan_inf_filter"]

    def is_emulated(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_emulated)
    assert recipe(TrainSettings(**TRAINED))["bf16"] is False
