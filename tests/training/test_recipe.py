"""Defaults of a run."""

from argparse import Namespace

import pytest
import torch

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training import recipe as module
from vanilla_transformer_tools.training.recipe import (
    config_overrides,
    dtype_of_products,
    in_step,
    recipe,
)

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


@pytest.mark.parametrize(
    ("given", "dtype"),
    [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)],
)
def test_products_have_the_type_that_is_asked_for(given, dtype):
    assert dtype_of_products(Namespace(**{"bf16": False, "fp16": False} | given)) == dtype


def test_validated_run_keeps_its_best_score():
    given = recipe(TrainSettings(**VALIDATED, metrics=["chrf", "bleu"]))

    assert given["metric_for_best_model"] == "chrf"
    assert (given["eval_strategy"], given["save_strategy"]) == ("epoch", "epoch")
    assert given["predict_with_generate"]
    assert given["load_best_model_at_end"]
    assert "eval_strategy" not in recipe(TrainSettings(**TRAINED))


def test_stream_is_saved_and_scored_by_updates():
    given = recipe(TrainSettings(**VALIDATED, streaming=True))

    assert (given["save_strategy"], given["eval_strategy"]) == ("steps", "steps")
    assert given["save_steps"] == given["eval_steps"]
    assert "eval_steps" not in recipe(TrainSettings(**TRAINED, streaming=True))


def test_run_of_minutes_is_saved_and_scored_by_updates():
    given = recipe(TrainSettings(**VALIDATED, minutes=1.0))

    assert (given["save_strategy"], given["eval_strategy"]) == ("steps", "steps")
    assert "eval_strategy" not in recipe(TrainSettings(**TRAINED, minutes=1.0))


# Config fields


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("d_model", "takes KEY=VALUE, got 'd_model'"),
        ("d_modle=64", "no field 'd_modle'. Did you mean d_model?"),
        ("qqq=64", "no field 'qqq'.$"),
        ("vocab_size=64", "--config vocab_size: use --vocab_size instead"),
        ("decoder_vocab_size=64", "use --separate_vocabularies with --target_vocab_size instead"),
        ("label_smoothing=0.2", "--config label_smoothing: use --label_smoothing_factor instead"),
    ],
)
def test_config_override_is_refused_when_it_sets_no_field(assignment, message):
    with pytest.raises(ValueError, match=message):
        config_overrides(TrainSettings(config=[assignment]))


def test_shared_table_is_refused_for_separate_vocabularies():
    table = "share_encoder_decoder_embeddings"
    assert config_overrides(TrainSettings(config=[f"{table}=true"])) == {table: True}

    with pytest.raises(ValueError, match=f"--config {table} must be false .* got true"):
        config_overrides(TrainSettings(config=[f"{table}=true"], separate_vocabularies=True))


def test_config_overrides_report_all_mistakes_at_once():
    with pytest.raises(ValueError, match="'qqq'") as caught:
        config_overrides(TrainSettings(config=["qqq=1", "vocab_size=1", "d_model"]))

    assert len(str(caught.value).splitlines()) == 3


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


def test_emulated_bfloat16_is_not_the_default_of_a_gpu(monkeypatch):
    def is_supported(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)

    assert recipe(TrainSettings(**TRAINED))["bf16"] is False


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
