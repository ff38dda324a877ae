"""`train` in two processes ends in the folder of one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vanilla_transformer_tools.commands.train import train

from ..support.documents import ROOT
from ..support.launching import launch
from ..support.training_runs import checkpoints_of, read_json, training_options


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_two_processes_end_in_the_folder_of_one(corpus, tmp_path, optimizer):
    pairs = [corpus / f"validation.{language}" for language in ("de", "en")]
    options = [*training_options(corpus, "dropout=0"), "--validation", *pairs]
    options += ["--max_validation_pairs", "4", "--generation_max_length", "12"]
    options += ["--moving_average", "0.8", "--average_last", "2", "--optimizer", optimizer]
    for kind in ("eval", "save"):
        options += [f"--{kind}_strategy", "steps", f"--{kind}_steps", "2"]
    # Adam divides by small numbers, which makes a step out of rounding.
    options = [*map(str, options), "--adam_epsilon", "1e-4", "--max_steps", "4", "--output_dir"]
    alone, together = str(tmp_path / "alone"), str(tmp_path / "together")

    train([*options, alone])
    launch(str(ROOT / "scripts" / "train.py"), *options, together)

    folders = Path(together), Path(alone)
    assert checkpoints_of(folders[0]) == checkpoints_of(folders[1]) == [2, 4]
    assert len({read_json(folder / "run.json")["weights"] for folder in folders}) == 1
    scores = [read_json(folder / "results.json")["validation"] for folder in folders]
    for name in ("bleu", "chrf", "exact_match", "lines"):
        assert scores[0][name] == scores[1][name]
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"])
    for name in ("model.safetensors", "checkpoint-2/moving_average.safetensors"):
        weights = [load_file(folder / name) for folder in folders]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
