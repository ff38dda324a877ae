"""Defaults of a run, and the settings that are refused before it starts."""

import math

import pytest

from vanilla_transformer.training.recipe import check_settings, prefer_better_scores, recipe
from vanilla_transformer_cli.settings import TrainSettings

from ..support.gradients_of_one_update import build_arguments

TRAINED = {"train": ["a.de", "a.en"]}
VALIDATED = {**TRAINED, "validation": ["b.de", "b.en"]}


@pytest.mark.parametrize(("settings", "limit"), [(TRAINED, 3), (VALIDATED, 4)])
def test_best_checkpoint_is_kept_beside_those_to_average(settings, limit):
    assert recipe(TrainSettings(**settings, average_last=3))["save_total_limit"] == limit


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
        ({"bpe_dropout": 0.99, "moving_average": 0.99}, {}),
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
        check_settings(TrainSettings(**VALIDATED, **settings), build_arguments(tmp_path, **given))


def test_all_mistakes_are_reported_at_once(tmp_path):
    settings = TrainSettings(**TRAINED, r_drop=-1.0, moving_average=0.9, target_vocab_size=9)

    with pytest.raises(ValueError, match="--r_drop") as caught:
        check_settings(settings, build_arguments(tmp_path, learning_rate=-1.0))

    assert len(str(caught.value).splitlines()) == 4
