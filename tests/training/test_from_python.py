"""`train` in Python: its options, what it returns, and its silence."""

import json
import os
from pathlib import Path

import pytest
import torch

from vanilla_transformer_tools.commands.train import train as train_command
from vanilla_transformer_tools.training import run, train
from vanilla_transformer_tools.translation import Translator

from ..support.documents import code_blocks
from ..support.training_runs import SIZES

FILES = ("train.de", "train.en"), ("validation.de", "validation.en")


@pytest.fixture
def options(corpus, tmp_path):
    """Options of a run of a few updates."""
    train_files, validation_files = ([str(corpus / name) for name in names] for names in FILES)
    sizes = (size.split("=") for size in SIZES)
    return {
        "train": train_files,
        "validation": validation_files,
        "config": {name: json.loads(value) for name, value in sizes} | {"pre_norm": False},
        "vocab_size": 320,
        "max_validation_pairs": 5,
        "metrics": ["exact_match", "bleu"],
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "bf16": False,
        "use_cpu": True,
    }


def test_training_returns_folder_and_scores_and_prints_nothing(options, capfd):
    folder, scores = train(**options, quiet=True)

    assert capfd.readouterr() == ("", "")
    recorded = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    assert scores == recorded["validation"]
    assert scores["lines"] == 5
    assert {"exact_match", "bleu_signature"} < scores.keys()
    assert len(list(Translator.from_pretrained(folder).translate(["zwei"]))) == 1


def test_without_validation_there_are_no_scores_and_the_plan_is_printed(options, capfd):
    folder, scores = train(**{**options, "validation": []})

    assert scores == {}
    assert f"The model is in {folder}" in capfd.readouterr().out


def test_options_are_those_of_the_command(options, monkeypatch):
    runs = []
    monkeypatch.setattr(
        run, "train", lambda settings, arguments, given: runs.append((settings, arguments, given))
    )
    monkeypatch.setattr("vanilla_transformer_tools.sharing.model_card.read_results", lambda _: {})
    options |= {"save_steps": 7, "init_from": None, "optimizer": "muon"}
    words = []
    for name, value in options.items():
        if name == "config":
            value = [f"{key}={json.dumps(size)}" for key, size in value.items()]
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]

    train(**options, quiet=False)
    train_command(words)

    (settings, arguments, given), (their_settings, their_arguments, their_given) = runs
    assert settings == their_settings
    # A folder of logs is named after the moment.
    ours, theirs = (
        {name: value for name, value in each.to_dict().items() if name != "logging_dir"}
        for each in (arguments, their_arguments)
    )
    assert ours == theirs
    assert ours["eval_steps"] == 7
    assert set(given) - {"init_from"} == set(their_given)


def test_unknown_option_is_refused(options):
    with pytest.raises(TypeError, match=r"no option 'minuts'.*--help-all"):
        train(**options, minuts=3)


# Trainer's default for GPUs, on machines without one.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_python_of_the_page_trains(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs("runs")
    Path("runs/numbers").symlink_to(corpus)
    torch.manual_seed(0)

    from_python, by_trainer = code_blocks("docs/train.md", "python")
    exec(from_python.replace("minutes=1", "max_steps=2, max_validation_pairs=5"), {})
    exec(by_trainer, {})

    *_, chrf = capsys.readouterr().out.split()
    assert 0 < float(chrf) <= 100
