"""Defaults of a run, and the settings that are refused before it starts."""

import math
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training import recipe as module
from vanilla_transformer_tools.training.recipe import (
    check_settings,
    config_overrides,
    describe_fine_tuning,
    dtype_of_products,
    in_step,
    prefer_better_scores,
    recipe,
)

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
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
    ],
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


@pytest.mark.parametrize(("metric", "greater"), [("bleu", True), ("wer", False)])
def test_lower_error_rates_are_better(tmp_path, metric, greater):
    arguments = build_arguments(tmp_path, metric_for_best_model=metric)

    prefer_better_scores(arguments)

    assert arguments.greater_is_better == greater


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"max_minutes": 0.0, "average_last": 0, "bpe_dropout": 0.0, "max_length": 2}, {}),
        ({"bpe_dropout": 0.99, "moving_average": 0.99}, {"eval_strategy": "epoch"}),
        ({}, {"num_train_epochs": 0, "max_steps": 1}),
        ({}, {"num_train_epochs": 0.5, "label_smoothing_factor": 0.99, "adam_beta2": 0.0}),
    ],
)
def test_numbers_at_the_ends_of_their_ranges_are_allowed(tmp_path, settings, given):
    check_settings(TrainSettings(**VALIDATED, **settings), build_arguments(tmp_path, **given))


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({"bpe_dropout": 1.0}, {}, "--bpe_dropout must be at least 0 and below 1, got 1.0"),
        ({"moving_average": 1.0}, {}, "--moving_average must be at least 0 and below 1, got 1.0"),
        ({"max_validation_pairs": 0}, {}, "--max_validation_pairs must be at least 1 and finite"),
        ({"max_tokens_per_batch": 0}, {}, "--max_tokens_per_batch must be at least 1"),
        ({"max_length": 1}, {}, "--max_length must be at least 2 and finite, got 1"),
        ({"minutes": 0.0}, {}, "--minutes must be above 0 and finite, got 0.0"),
        ({"minutes": math.nan}, {}, "--minutes must be above 0 and finite, got nan"),
        ({"max_minutes": -1.0}, {}, "--max_minutes must be at least 0 and finite, got -1.0"),
        ({"average_last": -3}, {}, "--average_last must be at least 0 and finite, got -3"),
        ({"r_drop": math.inf}, {}, "--r_drop must be at least 0 and finite, got inf"),
        ({"filter_max_ratio": 0.5}, {}, "--filter_max_ratio must be at least 1"),
        ({}, {"push_to_hub": True}, "share the finished model: vanilla-transformer push"),
        ({}, {"resume_from_checkpoint": "a"}, "--resume continues the run in --output_dir"),
        ({}, {"per_device_train_batch_size": 3}, "--max_tokens_per_batch is their size, got 3"),
        ({}, {"per_device_eval_batch_size": 0}, "_eval_batch_size must be at least 1"),
        (
            {},
            {"train_sampling_strategy": "group_by_length"},
            "--train_sampling_strategy must be le",
        ),
        ({}, {"auto_find_batch_size": True}, "--auto_find_batch_size must be left out"),
        ({}, {"dataloader_drop_last": True}, "--dataloader_drop_last must be left out"),
        ({}, {"remove_unused_columns": False}, "--remove_unused_columns must be left out"),
        ({}, {"eval_do_concat_batches": False}, "--eval_do_concat_batches must be left out"),
        ({}, {"save_strategy": "best"}, "--save_strategy best leaves nothing to resume from"),
        ({"minutes": 1.0}, {"warmup_steps": 0.1}, "--warmup_steps .* got the share 0.1"),
        ({"minutes": 1.0}, {"eval_steps": 0.5}, "--eval_steps must be a number of updates"),
        ({}, {"metric_for_best_model": "chrF"}, "must be loss or one of bleu, .*, got chrF"),
        (
            {},
            {"metric_for_best_model": "bleu", "prediction_loss_only": True},
            "--prediction_loss_only computes no bleu",
        ),
        ({"filter_max_ratio": math.nan}, {}, "--filter_max_ratio must be .* got nan"),
        ({"filter_max_characters": 0}, {}, "--filter_max_characters must be at least 1"),
        ({"tokenizer_pairs": 0}, {}, "--tokenizer_pairs must be at least 1"),
        ({}, {"lr_scheduler_type": "warmup_stable_decay"}, "got {}: .*num_decay_steps"),
        (
            {},
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}},
            "--lr_scheduler_type polynomial, got .*powr",
        ),
        ({"early_stopping_patience": 0}, {}, "--early_stopping_patience must be at least 1"),
        ({"validation": [], "early_stopping_patience": 3}, {}, "patience needs --validation"),
        ({"validation": [], "moving_average": 0.9}, {}, "--moving_average needs --validation"),
        ({"moving_average": 0.9}, {"eval_strategy": "no"}, "needs scores, got --eval_strategy no"),
        ({}, {"save_steps": 0}, "--save_steps must be above 0, got 0. For no checkpoints"),
        ({"target_vocab_size": 300}, {}, "needs --separate_vocabularies, got 300 alone"),
        ({}, {"learning_rate": math.nan}, "--learning_rate must be at least 0 and finite, got nan"),
        ({}, {"learning_rate": -1.0}, "--learning_rate must be at least 0 and finite, got -1.0"),
        ({}, {"label_smoothing_factor": 1.0}, "--label_smoothing_factor must .* below 1, got 1.0"),
        ({"max_minutes": math.nan}, {}, "--max_minutes must be at least 0 and finite, got nan"),
        ({}, {"adam_beta1": 1.0}, "--adam_beta1 must be at least 0 and below 1, got 1.0"),
        ({}, {"num_train_epochs": 0}, "--max_steps must be above 0, got 0 and -1"),
        ({"config": ["d_modle=3"]}, {}, "no field 'd_modle'"),
        ({"streaming": True}, {}, "--streaming needs --max_steps"),
        (
            {"metrics": ["chrf"]},
            {"metric_for_best_model": "bleu", "predict_with_generate": True},
            "must be one of --metrics, got bleu and chrf",
        ),
        (
            {},
            {"metric_for_best_model": "eval_bleu"},
            "must be loss with --predict_with_generate false, got bleu",
        ),
    ],
)
def test_setting_is_refused_when_no_run_can_follow_it(tmp_path, settings, given, message):
    with pytest.raises(ValueError, match=message):
        check_settings(TrainSettings(**VALIDATED | settings), build_arguments(tmp_path, **given))


@pytest.mark.parametrize(
    ("settings", "given", "named"),
    [
        ({}, {"max_steps": 9}, "--max_steps 9"),
        ({}, {"num_train_epochs": 3}, "--num_train_epochs 3"),
        ({}, {"lr_scheduler_type": "linear"}, "--lr_scheduler_type linear"),
        ({"max_minutes": 2.0}, {}, "--max_minutes 2.0"),
    ],
)
def test_minutes_exclude_another_length_and_schedule(tmp_path, settings, given, named):
    settings = TrainSettings(**TRAINED, minutes=1.5, **settings)
    by_time = {name: recipe(settings)[name] for name in ("lr_scheduler_type", "num_train_epochs")}

    check_settings(TrainSettings(**TRAINED, minutes=1.5), build_arguments(tmp_path, **by_time))
    with pytest.raises(ValueError, match=f"got --minutes 1.5 and {named}. Leave either out"):
        check_settings(settings, build_arguments(tmp_path, **by_time | given))


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_schedule_of_the_loss_cannot_finish_on_request(tmp_path, schedule):
    arguments = build_arguments(tmp_path, lr_scheduler_type=schedule, eval_strategy="epoch")

    check_settings(TrainSettings(**VALIDATED), arguments)
    with pytest.raises(ValueError, match=f"got --lr_scheduler_type {schedule}, where the loss"):
        check_settings(TrainSettings(**VALIDATED, finish_within=3), arguments)


@pytest.mark.parametrize("is_available", [False, True])
def test_option_needs_its_package(tmp_path, monkeypatch, is_available):
    kernel = "vanilla_transformer_tools.training.recipe.is_flash_attn_2_available"
    monkeypatch.setattr(kernel, lambda: is_available)
    reports = "vanilla_transformer_tools.training.recipe.get_available_reporting_integrations"
    monkeypatch.setattr(reports, lambda: ["wandb", "mlflow"][: 1 + is_available])
    settings = TrainSettings(**TRAINED, attn_implementation="flash_attention_2")
    arguments = build_arguments(tmp_path, report_to=["wandb", "mlflow"])
    refusal = nullcontext() if is_available else pytest.raises(ValueError, match="needs the pack")

    with refusal as refused:
        check_settings(settings, arguments)

    if refused:
        assert "--report_to mlflow needs the package mlflow. Install" in str(refused.value)
        assert "wandb" not in str(refused.value)
        assert "flash_attention_2 needs the package flash-attn" in str(refused.value)


def test_minutes_are_of_new_models(tmp_path):
    settings = TrainSettings(**TRAINED, minutes=1.5, init_from="runs/old")

    with pytest.raises(ValueError, match="size of a new model, got --init_from runs/old"):
        check_settings(settings, build_arguments(tmp_path))


def test_run_of_minutes_is_saved_and_scored_by_updates():
    given = recipe(TrainSettings(**VALIDATED, minutes=1.0))

    assert (given["save_strategy"], given["eval_strategy"]) == ("steps", "steps")
    assert "eval_strategy" not in recipe(TrainSettings(**TRAINED, minutes=1.0))


def test_two_gpus_of_one_process_are_refused(tmp_path):
    arguments = build_arguments(tmp_path)
    # Trainer would divide each batch, and R-Drop's two passes, among them by DataParallel.
    arguments._n_gpu = 2

    with pytest.raises(ValueError, match="got one process for 2"):
        check_settings(TrainSettings(**VALIDATED), arguments)


def test_no_process_searches_for_unused_parameters():
    assert recipe(TrainSettings(**TRAINED))["ddp_find_unused_parameters"] is False


def test_lost_process_is_noticed_within_ten_minutes():
    assert recipe(TrainSettings(**TRAINED))["ddp_timeout"] == 10 * 60


def test_dataset_of_one_split_is_not_validated_on(tmp_path):
    saved = str(tmp_path / "saved")
    Dataset.from_dict({"source": ["a"], "target": ["b"]}).save_to_disk(saved)
    both = TrainSettings(train=[saved], validation=[saved])

    with pytest.raises(ValueError, match=r"other pairs than --train, got .*saved' for both"):
        check_settings(both, build_arguments(tmp_path))
    check_settings(TrainSettings(train=[saved]), build_arguments(tmp_path))


def test_all_mistakes_are_reported_at_once(tmp_path):
    settings = TrainSettings(**TRAINED, r_drop=-1.0, moving_average=0.9, target_vocab_size=9)

    with pytest.raises(ValueError, match="--r_drop") as caught:
        check_settings(settings, build_arguments(tmp_path, learning_rate=-1.0))

    assert len(str(caught.value).splitlines()) == 4


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


def test_config_override_is_refused_beside_a_saved_model():
    with pytest.raises(ValueError, match="--config does not apply to the saved model 'runs/old'"):
        config_overrides(TrainSettings(config=["d_model=64"], init_from="runs/old"))


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


@pytest.mark.parametrize(("peft", "rate"), [(None, 1e-4), ("lora", 1e-3)])
def test_saved_model_is_fine_tuned_at_a_low_rate_and_the_plan_says_so(peft, rate):
    settings = TrainSettings(**TRAINED, init_from="runs/opus", preset="tiny", peft=peft)
    given = recipe(settings)
    chosen = Namespace(learning_rate=given["learning_rate"], warmup_steps=given["warmup_steps"])

    assert (chosen.learning_rate, chosen.warmup_steps) == (rate, 100)
    assert list(describe_fine_tuning(settings, chosen)) == [
        f"rate        {rate:g} after 100 updates of warm-up, the defaults with --init_from"
    ]


def test_plan_names_a_rate_that_was_given_and_none_of_a_new_model():
    given = Namespace(learning_rate=2e-3, warmup_steps=100)

    assert list(describe_fine_tuning(TrainSettings(**TRAINED, init_from="a"), given)) == [
        "rate        0.002 after 100 updates of warm-up"
    ]
    assert not list(describe_fine_tuning(TrainSettings(**TRAINED), given))


def test_new_tokenizer_of_a_saved_model_is_refused(tmp_path):
    settings = TrainSettings(**TRAINED, tokenizer="a", init_from="b")

    with pytest.raises(ValueError, match="--tokenizer must be left out with --init_from"):
        check_settings(settings, build_arguments(tmp_path))


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


def test_model_is_not_compiled_twice(tmp_path):
    arguments = build_arguments(tmp_path)
    arguments.torch_compile = True
    settings = TrainSettings(**TRAINED, compile_layers=True)

    with pytest.raises(ValueError, match="--torch_compile compiles the whole model and"):
        check_settings(settings, arguments)

    arguments.torch_compile = False
    check_settings(settings, arguments)
