"""Defaults of a run, and settings that are refused before it starts."""

import math

import pytest
import torch

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training import options as module
from vanilla_transformer_tools.training.options import config_overrides, consistent_defaults, recipe
from vanilla_transformer_tools.training.rules import check_settings

from ..support.gradients_of_one_update import build_arguments

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

    assert consistent_defaults(defaults, {"fp16": True}) == {"bf16": False, "learning_rate": 0.1}
    assert consistent_defaults(defaults, {"fp16": False}) == defaults


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
    defaults = consistent_defaults(recipe(TrainSettings(**VALIDATED)), given)

    assert {"load_best_model_at_end": True} | expected == {
        name: defaults[name] for name in {"load_best_model_at_end", *expected}
    }


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


# What is refused before a run starts

TUNED = {"init_from": "runs/base"}
TABLE = "share_encoder_decoder_embeddings=true"


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"max_minutes": 0.0, "average_last": 0, "bpe_dropout": 0.0, "max_length": 2}, {}),
        ({"bpe_dropout": 0.99, "moving_average": 0.99}, {"eval_strategy": "epoch"}),
        ({}, {"num_train_epochs": 0, "max_steps": 1}),
        ({**TUNED, "freeze": ["encoder"]}, {}),
        ({}, {"num_train_epochs": 0.5, "label_smoothing_factor": 0.99, "adam_beta2": 0.0}),
        ({"average_last": 3, "config": [TABLE]}, {"save_strategy": "epoch", "save_total_limit": 3}),
        ({"language": ["pt-BR", "code"], "streaming": True}, {"max_steps": 1}),
    ],
)
def test_numbers_at_the_ends_of_their_ranges_are_allowed(tmp_path, settings, given):
    check_settings(TrainSettings(**VALIDATED, **settings), build_arguments(tmp_path, **given))


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({"bpe_dropout": 1.0}, {}, "--bpe_dropout must be at least 0 and below 1, got 1.0"),
        ({"max_length": 1}, {}, "--max_length must be at least 2 and finite, got 1"),
        ({"minutes": math.nan}, {}, "--minutes must be at least 0.001 and finite, got nan"),
        ({}, {"eval_steps": -1}, "--eval_steps must be at least 0 and finite, got -1"),
        ({}, {"save_steps": math.inf}, "--save_steps must be at least 0 and finite, got inf"),
        ({}, {"push_to_hub": True}, "`vanilla-transformer push` shares the finished"),
        ({}, {"save_strategy": "best"}, "--save_strategy best leaves nothing to resume from"),
        ({"minutes": 1.0}, {"warmup_steps": 0.1}, "--warmup_steps, .* whose length .* got 0.1,"),
        ({}, {"metric_for_best_model": "chrF"}, "loss or one of --metrics, got chrF and .*bleu"),
        (
            {},
            {"metric_for_best_model": "bleu", "prediction_loss_only": True},
            "bleu is a score of generated text, .* --prediction_loss_only True",
        ),
        ({"moving_average": 0.9}, {"eval_strategy": "no"}, "need scores, got --eval_strategy no"),
        ({}, {"per_device_train_batch_size": 9}, "hold --max_tokens_per_batch .* length, got 9"),
        ({"bleu_tokenize": "zz"}, {}, "--bleu_tokenize: .*zz"),
        ({}, {"save_steps": 0}, "--save_steps must be above 0, got 0. For no checkpoints"),
        # Otherwise found after all updates, before the first score.
        ({}, {"generation_num_beams": 0}, "--generation_num_beams must be at least 1 and .* got 0"),
        ({}, {"generation_max_length": 1}, "--generation_max_length must be at least 2 .* got 1"),
        ({}, {"eval_accumulation_steps": 0}, "--eval_accumulation_steps must .* 1 .* got 0"),
        ({}, {"num_train_epochs": math.inf}, "--num_train_epochs must be .* finite, got inf"),
        ({}, {"data_seed": -1}, "--data_seed must be at least 0 and below 4,294,967,296, got -1"),
        ({}, {"num_train_epochs": 0}, "--max_steps must be above 0, got 0 and -1"),
        ({}, {"dataloader_num_workers": -1}, "--dataloader_num_workers must be at least 0 .* -1"),
        ({}, {"learning_rate": math.nan}, "--learning_rate must be at least 0 and finite, got nan"),
        ({}, {"save_total_limit": -1}, "--save_total_limit must be at least 0 and finite, got -1"),
        ({"title_case_every": 0}, {}, "--title_case_every must be at least 1"),
        ({"target_vocab_size": 300}, {}, "needs --separate_vocabularies, got 300 without it"),
        ({"tokenizer_pairs": 9}, {}, "--tokenizer_pairs needs --streaming, got 9 without it"),
        ({"config": ["d_model=6"]}, {}, r"^--config: `d_model` must be a multiple .* 6 and 4\..*$"),
        ({"config": ["d_model=x"]}, {}, "^--config: Field 'd_model' expected int, got str"),
        ({"config": ["dropout=nan"]}, {}, r"^--config: .*'nan' doesn't .* in \(float, int\)\.$"),
        ({"config": ["dropout=2", "norm_type=x"]}, {}, "--config: `dropout` .*\n--config: `norm"),
        ({"streaming": True, "bpe_dropout": 0.1}, {}, "BPE-dropout needs all words"),
        ({"all_caps_every": 9, "bpe_dropout": 0.1}, {}, "both draw each epoch again"),
        ({"all_caps_every": 9, "lowercase_sources": True}, {}, "in lower case do not show it"),
        ({"all_caps_every": 9, "tokenizer_kind": "word"}, {}, "a vocabulary that can write any"),
        (
            {},
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}},
            "must fit --lr_scheduler_type polynomial, got .*powr",
        ),
        (
            {"title_case_every": 9},
            {"dataloader_persistent_workers": True, "dataloader_num_workers": 1},
            "persistent workers would keep the first epoch",
        ),
        ({"filter_overlap": [], "validation": []}, {}, "--filter_overlap needs evaluation pairs"),
        (
            {"metrics": ["chrf"]},
            {"metric_for_best_model": "bleu", "predict_with_generate": True},
            r"one of --metrics, got bleu and \['chrf'\]",
        ),
        (
            {},
            {"metric_for_best_model": "eval_bleu"},
            "eval_bleu is a score of .*, got --predict_with_generate False",
        ),
        ({"minutes": 9, "init_from": "b"}, {}, "size of a new model; .* got 9 and b. Leave one"),
        ({"source_language": "de"}, {}, "need the tokenizers of a saved model, got de and None"),
        ({"freeze": ["encoder"]}, {}, r"--freeze needs --init_from, got \['encoder'\]"),
        ({"average_last": 3}, {"save_strategy": "epoch", "save_total_limit": 2}, "needs as many"),
        ({"average_last": 2}, {"save_strategy": "no"}, "got .* and --save_strategy no"),
        ({"config": [TABLE], "separate_vocabularies": True}, {}, "must be false .* got true"),
        ({"shuffle_buffer": 9}, {}, "--shuffle_buffer needs --streaming, got 9 without it"),
        ({"language": ["de", "english"]}, {}, r"codes of ISO 639, .*, got \['de', 'english'\]"),
    ],
)
def test_setting_is_refused_when_no_run_can_follow_it(tmp_path, settings, given, message):
    with pytest.raises(ValueError, match=message):
        check_settings(TrainSettings(**VALIDATED | settings), build_arguments(tmp_path, **given))


@pytest.mark.parametrize("given", [{"max_steps": 9}, {"lr_scheduler_type": "linear"}], ids=str)
def test_minutes_exclude_another_length_and_schedule(tmp_path, given):
    settings = TrainSettings(**TRAINED, minutes=1.5)
    by_time = {name: recipe(settings)[name] for name in ("lr_scheduler_type", "num_train_epochs")}
    ((name, value),) = given.items()

    check_settings(settings, build_arguments(tmp_path, **by_time))
    message = f"--minutes excludes --{name}: .* falls, got 1.5 and {value}. Leave one"
    with pytest.raises(ValueError, match=message):
        check_settings(settings, build_arguments(tmp_path, **by_time | given))


def test_report_needs_the_package_of_its_service(tmp_path, monkeypatch):
    reports = "vanilla_transformer_tools.training.rules.get_available_reporting_integrations"
    monkeypatch.setattr(reports, lambda: ["wandb"])
    settings = TrainSettings(**TRAINED)

    check_settings(settings, build_arguments(tmp_path, report_to=["wandb"]))
    with pytest.raises(ValueError, match=r"--report_to needs the packages .*'mlflow'\]. Install"):
        check_settings(settings, build_arguments(tmp_path, report_to=["wandb", "mlflow"]))


def test_two_gpus_of_one_process_are_refused(tmp_path):
    arguments = build_arguments(tmp_path)
    # Trainer would divide each batch, and R-Drop's two passes, among them by DataParallel.
    arguments._n_gpu = 2

    with pytest.raises(ValueError, match="got one process for 2"):
        check_settings(TrainSettings(**VALIDATED), arguments)


def test_all_mistakes_are_reported_at_once(tmp_path):
    settings = TrainSettings(
        **TRAINED, r_drop=-1.0, moving_average=0.9, target_vocab_size=9, config=["d_modle=3"]
    )

    with pytest.raises(ValueError, match="--r_drop") as caught:
        check_settings(settings, build_arguments(tmp_path, learning_rate=-1.0))

    assert len(str(caught.value).splitlines()) == 5
