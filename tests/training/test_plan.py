"""The plan of a run: every choice is made once, and recorded, for new runs and resumed ones."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer
from vanilla_transformer_tools.files import checksum
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.privacy import find_disclosures
from vanilla_transformer_tools.training import machine
from vanilla_transformer_tools.training import plan as planning
from vanilla_transformer_tools.training import record as module
from vanilla_transformer_tools.training.corpus import Facts
from vanilla_transformer_tools.training.minutes import Decision
from vanilla_transformer_tools.training.options import recipe
from vanilla_transformer_tools.training.plan import RunPlan, default_batch, plan_run
from vanilla_transformer_tools.training.record import describe_run, record_of

from ..support.training_runs import build_arguments

FACTS = Facts(pairs=5, inner_ends=0.0, without_letter=0.0)


def plan(folder: Path, *, previous=None, facts=FACTS, arguments=None, **changes) -> RunPlan:
    """The plan of a run in a folder; `previous` is the record of the one that it resumes."""
    of_plan = {name: changes.pop(name) for name in ("stats", "given") if name in changes}
    ours = TrainSettings(**changes)
    of_trainer = build_arguments(ours, folder, **arguments or {})
    checkpoint = None if previous is None else folder / "checkpoint-7"
    return plan_run(ours, of_trainer, facts, checkpoint=checkpoint, previous=previous, **of_plan)


def test_record_is_that_of_the_plan(tmp_path):
    facts = dataclasses.replace(FACTS, source_words=("der", "/home/anna/x"))

    made = plan(tmp_path, facts=facts, arguments={"label_smoothing_factor": 0.2})

    record = record_of(made, {})
    assert record["settings"] == dataclasses.asdict(made.settings)
    assert record["settings"]["max_tokens_per_batch"] == 8192
    assert record["arguments"]["label_smoothing_factor"] == 0.2
    assert record["sources_without_letters"] == 0.0
    assert record["frequent_source_words"][0] == "der"
    assert "anna" not in record["frequent_source_words"][1]
    assert record["first_update"] == 0
    assert made.batch_reason == ""


@pytest.mark.parametrize(("share", "hint"), [(0.02, ""), (0.021, " if told to")])
def test_what_the_text_shows_is_described(tmp_path, share, hint):
    facts = Facts(300, share, 0.0, validation_pairs=9, bleu=BleuTokenizer("zh", "Chinese"))

    lines = list(plan(tmp_path, facts=facts, validation=["v"], max_validation_pairs=5).describe())

    words = f"{share:.1%} of the sources have more than one; translate cuts lines by sentence"
    assert f"sentences   {words}{hint}" in lines
    assert "validation  5 of 9 pairs, from all over them" in lines
    assert "BLEU        tokenizer zh: Chinese" in lines
    stream = plan(tmp_path, facts=Facts(None, share, 0.0))
    assert f"{share:.1%} of the first sources" in "".join(stream.describe())


# What --minutes chooses

CHOSEN = {
    "preset": "small",
    "dropout": 0.2,
    "metrics": ["wer", "per"],
    "max_tokens_per_batch": 5000,
    "optimizer": "muon",
    "warmup_steps": 11,
    "eval_steps": 5,
}


@pytest.fixture
def rules(monkeypatch):
    def decide(stats, settings, tokenizers, given):
        left = {name: value for name, value in CHOSEN.items() if name not in given}
        return tuple(Decision(name, value, "much text") for name, value in left.items())

    monkeypatch.setattr(planning, "decide", decide)


@pytest.mark.usefixtures("rules")
def test_decisions_reach_settings_arguments_and_the_defaults_that_follow(tmp_path):
    given = TrainSettings(validation=["v"], minutes=1.0, config=["d_model=64"], metrics=["wer"])
    arguments = build_arguments(given, tmp_path)
    before = arguments.to_dict()

    made = plan_run(given, arguments, FACTS, stats=object())

    # The caller's stay as they are.
    assert arguments.to_dict() == before != made.arguments.to_dict()
    settings, arguments = made.settings, made.arguments
    assert (settings.preset, settings.config) == ("small", ["d_model=64", "dropout=0.2"])
    assert settings.max_tokens_per_batch == 5000
    assert (made.config.d_model, made.config.dropout) == (64, 0.2)
    assert (arguments.eval_steps, arguments.save_steps) == (5, 5)
    assert arguments.weight_decay == 0.5
    assert arguments.metric_for_best_model == "wer"
    assert not arguments.greater_is_better
    assert [each["option"] for each in record_of(made, {})["decisions"]] == list(CHOSEN)
    assert "chosen      --preset small: much text" in made.describe()


@pytest.mark.usefixtures("rules")
def test_given_options_stay_and_defaults_of_the_chosen_preset_do_not(tmp_path):
    of_small = recipe(TrainSettings(preset="small"))["learning_rate"]
    given = {"minutes": 1.0, "stats": object()}

    free = plan(tmp_path, arguments={"learning_rate": 5e-3}, **given)
    kept = plan(tmp_path, arguments={"learning_rate": 7.0}, given=["learning_rate"], **given)

    assert free.arguments.learning_rate == of_small
    assert kept.arguments.learning_rate == 7.0
    assert free.arguments.warmup_steps == 11


@pytest.mark.usefixtures("rules")
def test_resumed_run_keeps_all_decisions_on_record(tmp_path):
    recorded = [{"option": "vocab_size", "value": 77, "reason": "few"}]
    resumed = {"previous": {"decisions": recorded}, "minutes": 1.0, "resume": True}

    made, other = plan(tmp_path, **resumed), plan(tmp_path, given={"vocab_size"}, **resumed)

    assert (made.settings.vocab_size, other.settings.vocab_size) == (77, 10_000)
    assert record_of(other, resumed["previous"])["decisions"] == recorded


# What the machine and an earlier part of a run decide


@pytest.mark.parametrize(
    ("is_faster", "recorded", "given", "expected"),
    [
        (False, None, (), False),
        (True, None, (), True),
        (True, None, ("bf16",), False),
        # A busy machine may measure otherwise when a run is resumed.
        (False, True, (), True),
        (True, False, (), False),
    ],
)
def test_bf16_is_decided_once(tmp_path, monkeypatch, is_faster, recorded, given, expected):
    monkeypatch.setattr(machine, "bf16_is_faster_on_cpu", lambda: is_faster)
    arguments = build_arguments(TrainSettings(), tmp_path)
    before = arguments.to_dict()
    previous = {} if recorded is None else {"arguments": {"bf16": recorded}}

    made = machine.with_precision(arguments, previous, given)

    assert (made.bf16, made.mixed_precision) == (expected, "bf16" if expected else "no")
    # The caller's stay as they are.
    assert arguments.to_dict() == before
    monkeypatch.setattr(type(arguments), "device", torch.device("cuda"))
    assert machine.with_precision(arguments, {}, ()).bf16 is False


def test_resumed_run_keeps_its_batches(tmp_path):
    previous = {"settings": {"max_tokens_per_batch": 7000}}

    made = plan(tmp_path, previous=previous)

    assert made.settings.max_tokens_per_batch == 7000
    assert record_of(made, previous)["first_update"] == 7
    other = plan(tmp_path, previous=previous, max_tokens_per_batch=400)
    with pytest.raises(ValueError, match="--max_tokens_per_batch was 7000, got 400"):
        record_of(other, previous)


@pytest.mark.parametrize(
    ("settings", "accumulated", "pairs", "tokens"),
    [
        # Section 5.1 of the paper, whose rates these presets have.
        ({"preset": "big"}, 1, 1_000_000, 50_000),
        ({"preset": "base"}, 1, None, 50_000),
        ({"preset": "base"}, 2, 1_000_000, 25_000),
        ({"preset": "base"}, 16, 1_000_000, 8192),
        ({"preset": "base"}, 1, 999_999, 8192),
        ({"preset": "small"}, 1, 1_000_000, 8192),
        # Its rate was not found with the paper's batch.
        ({"preset": "base", "init_from": "a"}, 1, 1_000_000, 8192),
    ],
)
def test_gpu_gets_the_batch_that_the_rate_belongs_to(settings, accumulated, pairs, tokens):
    chosen, reason = default_batch(TrainSettings(**settings), "cuda", accumulated, pairs)

    assert chosen == tokens
    assert ("50,000 an update as in the paper" in reason) == (tokens > 8192)
    assert default_batch(TrainSettings(**settings), "cpu", accumulated, pairs) == (8192, "")


# Fine-tuning


def test_saved_model_is_fine_tuned_at_a_low_rate_and_scored_before(tmp_path):
    settings = {"init_from": "runs/opus"}
    defaults = {"learning_rate": 1e-4, "warmup_steps": 100}
    line = "rate        0.0001 after 100 updates of warm-up"

    made = plan(tmp_path, arguments=defaults, validation=["v"], **settings)
    others = [*plan(tmp_path, arguments=defaults | {"warmup_steps": 9}, **settings).describe()]

    assert recipe(TrainSettings(**settings)).items() >= defaults.items()
    assert next(made.describe()) == f"{line}, the defaults with --init_from"
    assert others[0] == line.replace("100", "9")
    assert not any(line.startswith("rate") for line in plan(tmp_path).describe())
    assert made.with_start
    assert made.arguments.eval_on_start
    resumed = plan(tmp_path, previous={}, validation=["v"], **settings)
    assert (resumed.with_start, resumed.arguments.eval_on_start) == (True, False)


# Scores


@pytest.mark.parametrize(
    ("settings", "arguments", "averaged", "evaluations"),
    [
        ({}, {}, 1, 1),
        ({"average_last": 3}, {}, 3, 1),
        ({"validation": ["v"]}, {}, 5, 2),
        ({"validation": ["v"], "average_last": 1, "moving_average": 0.9}, {}, 1, 2),
        ({"validation": ["v"]}, {"eval_strategy": "no", "load_best_model_at_end": False}, 1, 1),
    ],
)
def test_checkpoints_are_averaged_by_default_if_scores_can_compare(
    tmp_path, settings, arguments, averaged, evaluations
):
    made = plan(tmp_path, arguments=arguments, **settings)

    assert (made.averaged, made.last_evaluations) == (averaged, evaluations)


@pytest.mark.parametrize(
    ("metric", "greater"), [("bleu", True), ("eval_bleu", True), ("wer", False)]
)
def test_error_rates_choose_the_lowest_score(tmp_path, metric, greater):
    made = plan(tmp_path, validation=["v"], arguments={"metric_for_best_model": metric})

    assert made.arguments.greater_is_better == greater


# What a run is made from

TOKEN = "hf_" + "aB3" * 11


def test_commit_says_whether_the_tree_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "plan.py"))
    assert module._commit() is None
    (tmp_path / "plan.py").write_text("1")
    given = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*given, *words], check=True)

    clean = module._commit()
    (tmp_path / "plan.py").write_text("2")

    assert clean
    assert module._commit() == f"{clean}-dirty"
    # A wheel in an environment inside of somebody's repository.
    monkeypatch.setattr(module, "__file__", str(tmp_path / "installed.py"))
    (tmp_path / "installed.py").write_text("1")
    assert module._commit() is None


@pytest.fixture
def pairs(tmp_path):
    """Two files each to train and validate on, with the same names in two folders."""
    folders = tmp_path / "home" / "jo", tmp_path / "validation"
    for folder in folders:
        folder.mkdir(parents=True)
        for language in ("de", "en"):
            (folder / f"text.{language}").write_text(f"{folder.name} {language}\n")
    return [[str(folder / f"text.{language}") for language in ("de", "en")] for folder in folders]


@pytest.fixture
def describe(tmp_path):
    def describe_settings(**settings):
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path / "runs" / "de-en"), use_cpu=True, hub_token=TOKEN, hub_model_id="me/model"
        )
        return describe_run(TrainSettings(**settings), arguments, 5)

    return describe_settings


def test_record_holds_neither_the_token_nor_a_path_of_the_machine(
    describe, pairs, tmp_path, monkeypatch
):
    train, validation = pairs
    monkeypatch.setenv("HF_TOKEN", "hf_short8")
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--train", *train, "--hub_token", TOKEN, "--run_name=hf_short8"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "vanilla-transformer"), *words])

    record = describe(train=train, validation=validation, init_from=str(tmp_path / "base"))

    text = json.dumps(record, indent=2)
    assert TOKEN not in text
    assert str(tmp_path) not in text
    assert find_disclosures(text) == []
    assert record["command"] == [
        *("vanilla-transformer", "--train", "text.de", "text.en"),
        *("--hub_token", "<secret>", "--run_name=<secret>"),
    ]
    assert record["settings"]["init_from"] == "base"
    assert record["arguments"]["output_dir"] == "de-en"
    assert record["arguments"]["hub_model_id"] == "me/model"
    assert record["first_update"] == 5


def test_record_tells_files_of_one_name_apart_by_their_checksums(describe, pairs):
    train, validation = pairs

    record = describe(train=train, validation=validation[:1], filter_overlap=validation[1:])

    assert record["sha256"] == {
        "text.de": checksum(train[0]),
        "text.en": checksum(train[1]),
        "text.de (2)": checksum(validation[0]),
        "text.en (2)": checksum(validation[1]),
    }
    assert record["settings"]["train"] == ["text.de", "text.en"]
    assert record["settings"]["validation"] == ["text.de (2)"]
    assert record["settings"]["filter_overlap"] == ["text.en (2)"]


@pytest.mark.parametrize("setting", ["train", "init_from"])
def test_record_tells_folders_apart_by_what_they_hold(describe, tmp_path, setting):
    folder = tmp_path / "pairs"
    (folder / "split").mkdir(parents=True)
    (folder / "split" / "part.safetensors").touch()
    weights = folder / "model.safetensors"
    weights.touch()

    def checksum_with(text, name="model.safetensors"):
        weights.rename(folder / name).write_text(text)
        path = str(folder)
        return describe(**{setting: [path] if setting == "train" else path})["sha256"]["pairs"]

    first = checksum_with("one")
    assert len(first) == 64
    assert checksum_with("two") != first
    # Files that `datasets` leaves there, and the card of a model, are nothing to learn from.
    (folder / ("cache-1.arrow" if setting == "train" else "README.md")).touch()
    assert checksum_with("one") == first
    assert checksum_with("one", name="other.safetensors") != first
