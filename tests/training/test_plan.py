"""The plan of a run: every choice is made once, and recorded, for new runs and resumed ones."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.evaluation import bleu_tokenizers
from vanilla_transformer_tools.files import checksum
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.sharing.privacy import find_disclosures
from vanilla_transformer_tools.text.filters import Corpus, FilteredPairs
from vanilla_transformer_tools.training import auto_settings
from vanilla_transformer_tools.training import plan as module
from vanilla_transformer_tools.training.plan import (
    PLANNED_SHARE,
    choose_batch_size,
    describe_run,
    estimated_memory,
    plan_run,
)
from vanilla_transformer_tools.training.recipe import recipe
from vanilla_transformer_tools.training.starting_model import NEW

from ..models import build_variant
from ..support.pretended_device import OnDevice, move, pretended_device, put
from ..support.training_runs import build_arguments

TOKYO = "\u6771\u4eac"
PAIRS = Dataset.from_dict({"source": ["a b. C d."] + ["a"] * 4, "target": [TOKYO] * 5})


def corpus_of(**sets: Dataset) -> Corpus:
    """Five training pairs, and validation sets."""
    return Corpus(FilteredPairs(PAIRS, (), np.zeros(5, np.uint8)), sets, lambda: iter(()))


def plan(folder: Path, *, previous=None, corpus=None, given=(), arguments=None, **settings):
    """The plan of a run in a folder; `previous` is the record of the one that it resumes."""
    ours = TrainSettings(**settings)
    of_trainer = build_arguments(ours, folder, **arguments or {})
    checkpoint = None
    if previous is not None:
        checkpoint = folder / "checkpoint-7"
        (folder / "run.json").write_text(json.dumps(previous))
    return plan_run(ours, of_trainer, corpus or corpus_of(), NEW, checkpoint, given)


def test_record_is_that_of_the_plan(tmp_path):
    made = plan(tmp_path, arguments={"label_smoothing_factor": 0.2})

    assert made.record["settings"] == dataclasses.asdict(made.settings)
    assert (
        made.record["settings"]["max_tokens_per_batch"]
        == made.settings.max_tokens_per_batch
        == 8192
    )
    assert made.record["arguments"]["label_smoothing_factor"] == 0.2
    assert made.batch_reason == ""
    assert made.record["first_update"] == 0


@pytest.mark.parametrize(("lines", "hint"), [(6, ""), (7, " if told to")])
def test_lines_of_several_sentences_are_counted(tmp_path, lines, hint):
    sources = ["Ja. Nein."] * lines + ["Ja."] * (300 - lines)
    pairs = Dataset.from_dict({"source": sources, "target": sources})
    filtered = FilteredPairs(pairs, (), np.zeros(300, np.uint8))

    made = plan(tmp_path, corpus=Corpus(filtered, {}, lambda: iter(())))

    assert made.record["lines_of_several_sentences"] == round(lines / 300, 4)
    words = f"{lines / 300:.1%} of the sources have more than one; translate cuts lines by sentence"
    assert f"sentences   {words}{hint}" in list(made.describe())


# What --minutes chooses

RULES = {
    "preset": lambda *_: ("small", "much text"),
    "dropout": lambda *_: (0.2, "some passes"),
    "metrics": lambda *_: (["wer", "per"], "symbols"),
    "max_tokens_per_batch": lambda *_: (5000, "about 9 updates"),
    "warmup_steps": lambda *_: (11, "a tenth"),
    "eval_steps": lambda *_: (5, "twelve times"),
}


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setattr(module, "measure", lambda *_: None)
    monkeypatch.setattr(auto_settings, "RULES", RULES)


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("minutes", [None, 1.0])
def test_arguments_of_the_caller_stay_as_they_are(tmp_path, minutes):
    settings = TrainSettings(validation=["v"], metrics=["wer"], minutes=minutes)
    arguments = build_arguments(settings, tmp_path)
    before = arguments.to_dict()

    decided = plan_run(settings, arguments, corpus_of()).arguments

    assert arguments.to_dict() == before != decided.to_dict()


@pytest.mark.usefixtures("rules")
def test_decisions_reach_settings_arguments_and_the_defaults_that_follow(tmp_path):
    sets = {"validation": Dataset.from_dict({"source": ["a"], "target": ["b"]})}
    text = {"validation": ["v.de", "v.en"], "corpus": corpus_of(**sets)}

    made = plan(tmp_path, minutes=1.0, config=["d_model=64"], **text)

    settings, arguments = made.settings, made.arguments
    assert (settings.preset, settings.config) == ("small", ["d_model=64", "dropout=0.2"])
    assert settings.max_tokens_per_batch == 5000
    assert (made.config.d_model, made.config.dropout) == (64, 0.2)
    assert (arguments.eval_steps, arguments.save_steps) == (5, 5)
    assert arguments.metric_for_best_model == "wer"
    assert not arguments.greater_is_better
    assert [decision["option"] for decision in made.record["decisions"]] == list(RULES)
    assert "chosen      --preset small: much text" in made.describe()


@pytest.mark.usefixtures("rules")
def test_given_options_stay_and_defaults_of_the_chosen_preset_do_not(tmp_path):
    of_small = recipe(TrainSettings(preset="small"))["learning_rate"]

    free = plan(tmp_path, minutes=1.0, arguments={"learning_rate": 5e-3})
    kept = plan(tmp_path, minutes=1.0, arguments={"learning_rate": 7.0}, given=("learning_rate",))

    assert free.arguments.learning_rate == of_small
    assert kept.arguments.learning_rate == 7.0
    assert free.arguments.warmup_steps == 11


@pytest.mark.usefixtures("rules")
def test_resumed_run_keeps_all_decisions_on_record(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measure", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(auto_settings, "RULES", {})
    recorded = [{"option": "vocab_size", "value": 77, "reason": "few"}]

    made = plan(tmp_path, previous={"decisions": recorded}, minutes=1.0, resume=True)
    other = plan(
        tmp_path, previous={"decisions": recorded}, minutes=1.0, resume=True, given={"vocab_size"}
    )

    assert (made.settings.vocab_size, other.settings.vocab_size) == (77, 10_000)
    assert other.record["decisions"] == recorded


# The size of the batches


def test_resumed_run_keeps_its_batches(tmp_path):
    previous = {"settings": {"max_tokens_per_batch": 7000}}

    made = plan(tmp_path, previous=previous)

    assert made.settings.max_tokens_per_batch == 7000
    assert made.record["first_update"] == 7
    with pytest.raises(ValueError, match="--max_tokens_per_batch was 7000, got 400"):
        plan(tmp_path, previous=previous, max_tokens_per_batch=400)


@pytest.mark.usefixtures("rules")
def test_batch_that_a_rule_chose_must_fit_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda device: 1)

    made = plan(tmp_path, minutes=1.0, max_length=20)

    assert made.settings.max_tokens_per_batch == 80
    line = "batch       80 tokens, because 5,000 do not fit 0.0 GB of free memory, by estimate"
    assert line in list(made.describe())


# The learning rate of fine-tuning


@pytest.mark.parametrize(("peft", "rate"), [(None, 1e-4), ("lora", 1e-3)])
def test_saved_model_is_fine_tuned_at_a_low_rate_and_the_plan_says_so(tmp_path, peft, rate):
    settings = {"init_from": "runs/opus", "peft": peft}
    defaults = {"learning_rate": rate, "warmup_steps": 100}
    line = f"rate        {rate:g} after 100 updates of warm-up"

    lines = [*plan(tmp_path, arguments=defaults, **settings).describe()]
    others = [*plan(tmp_path, arguments=defaults | {"warmup_steps": 9}, **settings).describe()]

    assert recipe(TrainSettings(**settings)).items() >= defaults.items()
    assert lines[0] == f"{line}, the defaults with --init_from"
    assert others[0] == line.replace("100", "9")
    assert not any(line.startswith("rate") for line in plan(tmp_path).describe())


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
    ("changes", "expected"),
    [
        ({}, "zh"),
        ({"language": ["de", "ja"]}, "char"),
        ({"target_language": "ja"}, "char"),
        ({"validation": ["v.de", "v.ja"]}, "char"),
        ({"bleu_tokenize": "intl"}, "intl"),
        ({"pretokenized": True}, "none"),
    ],
)
def test_bleu_tokenizer_is_that_of_the_target_language(tmp_path, changes, expected, monkeypatch):
    monkeypatch.setattr(bleu_tokenizers, "_is_usable", lambda name: name in ("char", "zh", "13a"))

    made = plan(tmp_path, corpus=corpus_of(validation=PAIRS), **{"validation": ["v.tsv"]} | changes)

    assert made.bleu_tokenizers["validation"].name == expected
    assert made.record["bleu_tokenizers"]["validation"]["name"] == expected


@pytest.mark.parametrize(
    ("metric", "expected", "greater"),
    [
        ("bleu", "chrf", True),
        ("eval_bleu", "chrf", True),
        ("wer", "wer", False),
        ("news_bleu", "news_bleu", True),
    ],
)
def test_chrf_decides_where_no_tokenizer_fits(tmp_path, metric, expected, greater):
    tokenizers = {
        "validation": {"name": "char", "reason": "mixed", "fits": False},
        "news": {"name": "zh", "reason": "Chinese", "fits": True},
    }
    made = plan(
        tmp_path,
        previous={"bleu_tokenizers": tokenizers},
        corpus=corpus_of(validation=PAIRS, news=PAIRS),
        validation=["v"],
        arguments={"metric_for_best_model": metric},
    )

    assert made.arguments.metric_for_best_model == expected
    assert made.arguments.greater_is_better == greater


# The size of the batches on a GPU: what fits its memory

GIGABYTE = 10**9
CUDA = torch.device("cuda")


def model_of(preset):
    """A model without values."""
    with torch.device("meta"):
        config = VanillaTransformerConfig(**PRESETS[preset].config(), vocab_size=10_000)
        return VanillaTransformerForConditionalGeneration(config)


def choose(
    monkeypatch,
    gigabytes,
    *,
    accumulated=1,
    processes=1,
    pairs=1_000_000,
    device=CUDA,
    **settings: Any,
):
    """The choice for a GPU with so much free memory."""
    free = round(gigabytes * GIGABYTE)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    arguments = SimpleNamespace(
        device=torch.device(device),
        gradient_accumulation_steps=accumulated,
        world_size=processes,
        bf16=True,
        fp16=False,
    )
    settings = TrainSettings(**settings)
    config = model_of(settings.preset).config
    return choose_batch_size(settings, arguments, config, pairs)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        # Section 5.1 of the paper, whose rates these presets have.
        ({"preset": "big"}, 50_000),
        ({"preset": "base", "pairs": None}, 50_000),
        ({"preset": "base", "accumulated": 2}, 25_000),
        ({"preset": "base", "accumulated": 16}, 8192),
        ({"preset": "base", "pairs": 999_999}, 8192),
        ({"preset": "small"}, 8192),
        # Its rate was not found with the paper's batch.
        ({"preset": "base", "init_from": "a"}, 8192),
    ],
)
def test_large_gpu_gets_the_batch_that_the_rate_belongs_to(monkeypatch, settings, tokens):
    chosen, reason = choose(monkeypatch, 80, **settings)

    assert chosen == tokens
    assert ("50,000 an update as in the paper" in reason) == (tokens > 8192)
    assert reason.endswith(" fit the GPU's memory")


@pytest.mark.parametrize(
    ("settings", "passes", "copies"),
    [
        ({"preset": "big"}, 1, 0),
        ({"preset": "base", "r_drop": 5.0}, 2, 0),
        ({"preset": "base", "moving_average": 0.9}, 1, 1),
    ],
)
def test_small_gpu_gets_what_fits(monkeypatch, settings, passes, copies):
    tokens, reason = choose(monkeypatch, 9, **settings)

    model = model_of(settings["preset"])
    memory = estimated_memory(model, CUDA, is_half=True, passes=passes, copies=copies)
    planned = PLANNED_SHARE * 9 * GIGABYTE - memory.fixed
    assert tokens % 1000 == 0
    assert 0 < tokens * memory.per_token <= planned
    assert (tokens + 1000) * memory.per_token > planned
    assert reason == "because 50,000 do not fit 9.0 GB of free memory, by estimate"


@pytest.mark.parametrize(
    ("settings", "tokens"), [({}, 1024), ({"max_length": 640}, 2560), ({"processes": 4}, 4096)]
)
def test_gpu_without_room_gets_the_fewest_tokens_that_hold_all_pairs(monkeypatch, settings, tokens):
    assert choose(monkeypatch, 0.5, preset="big", **settings)[0] == tokens


def test_processes_share_what_fits_the_fullest_gpu(monkeypatch):
    monkeypatch.setattr(module, "gather_object", lambda free: [*free, 4 * GIGABYTE, free[0] + 1])
    tokens, reason = choose(monkeypatch, 6, preset="base", processes=3)

    # Each has a copy of the gradients.
    memory = estimated_memory(model_of("base"), CUDA, is_half=True, copies=1)
    room = 3 * ((PLANNED_SHARE * 4 * GIGABYTE - memory.fixed) / memory.per_token)
    assert tokens == room // 1000 * 1000
    assert "4.0 GB" in reason


def test_estimate_is_near_what_a_step_keeps_for_its_backward_pass():
    sizes = {"d_model": 64, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    model = build_variant(**sizes, dropout=0.1, encoder_layers=1, decoder_layers=4).train()
    ids = torch.randint(3, 37, (8, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnDevice):
            kept[tensor.on_cpu.untyped_storage().data_ptr()] = tensor.on_cpu
        return tensor

    with pretended_device():
        move(model)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(**put(batch))
        weights = {one.on_cpu.untyped_storage().data_ptr() for one in model.parameters()}
    bytes_kept = sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in weights
    )

    estimate = estimated_memory(model, torch.device("cpu"), is_half=False).per_token
    assert 0.6 * estimate < bytes_kept / (2 * ids.numel()) < 1.1 * estimate


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

    record = describe(train=train, validation=validation, filter_overlap=train[:1])

    assert record["sha256"] == {
        "text.de": checksum(train[0]),
        "text.en": checksum(train[1]),
        "text.de (2)": checksum(validation[0]),
        "text.en (2)": checksum(validation[1]),
    }
    assert record["settings"]["train"] == ["text.de", "text.en"]
    assert record["settings"]["validation"] == ["text.de (2)", "text.en (2)"]
    assert record["settings"]["filter_overlap"] == ["text.de"]


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
