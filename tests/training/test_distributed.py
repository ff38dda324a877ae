"""`train` in two processes, under FSDP and without, ends in the folder of one process."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer_tools.commands.train import train

from ..support import run_sharded
from ..support.documents import ROOT
from ..support.launching import launch
from ..support.training_runs import checkpoints_of, read_json, training_options

pytestmark = pytest.mark.slow


def command_options(corpus: Path, folder: Path) -> list[str]:
    """Four updates with all that looks at whole weights: scores, averages, checkpoints."""
    pairs = [corpus / f"validation.{language}" for language in ("de", "en")]
    options = [*training_options(corpus, "dropout=0"), "--validation", *pairs]
    options += ["--max_validation_pairs", "4", "--generation_max_length", "12"]
    options += ["--moving_average", "0.8", "--average_last", "2", "--output_dir", folder]
    for kind in ("eval", "save"):
        options += [f"--{kind}_strategy", "steps", f"--{kind}_steps", "2"]
    # Adam divides by small numbers, which makes a step out of rounding.
    return [*map(str, options), "--adam_epsilon", "1e-4", "--max_steps", "4"]


@pytest.fixture(scope="module")
def command_alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one process."""
    folder = tmp_path_factory.mktemp("command") / "run"
    train(command_options(corpus, folder))
    return folder


def launch_under_fsdp(place: Path, *runs: list[str]) -> str:
    """Runs `train` in two processes that divide the model, again and again; what was printed."""
    settings = yaml.safe_load((ROOT / "examples" / "launch" / "fsdp.yaml").read_text())
    script = [run_sharded.__file__, str(place / "note"), str(ROOT / "scripts" / "train.py")]
    with pytest.MonkeyPatch.context() as patch:
        # What `accelerate launch` makes of the file.
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        for name, value in settings["fsdp_config"].items():
            patch.setenv(name.upper(), str(value).lower() if value in (True, False) else str(value))
        # Launchers' files that `accelerate config` writes have this.
        patch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
        patch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
        printed = "".join(launch(*script, *options) for options in runs)
    assert {path.name for path in place.glob("note-*")} == {"note-0", "note-1"}
    return printed


@pytest.fixture(scope="module")
def command_sharded(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of the same run in two processes that stopped once, and what they printed."""
    place = tmp_path_factory.mktemp("sharded")
    options = command_options(corpus, place / "run")
    return place / "run", launch_under_fsdp(
        place, [*options, "--max_steps", "2"], [*options, "--resume"]
    )


def test_command_under_fsdp_ends_in_the_folder_of_one_process(
    corpus, command_alone, command_sharded
):
    folder, printed = command_sharded

    ids = torch.tensor([[5, 9, 2]])
    logits = [
        AutoModelForSeq2SeqLM.from_pretrained(each)(input_ids=ids, decoder_input_ids=ids).logits
        for each in (command_alone, folder)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    names = [{path.name for path in each.iterdir()} for each in (command_alone, folder)]
    # Nothing is drawn in this process.
    assert names[0] | {"curves.svg"} == names[1]
    records = [read_json(each / "run.json") for each in (command_alone, folder)]
    assert records[0]["weights"] == records[1]["weights"]
    assert records[0]["parameters"] == records[1]["parameters"]
    assert printed.count("no batches are tried") == 2
    assert "(mean of the last 2 checkpoints)" in printed
    assert "(exponential moving average, 0.8)" in printed
    with pytest.raises(ValueError, match="continues checkpoint-4 with FSDP"):
        train([*command_options(corpus, folder), "--max_steps", "6", "--resume"])


@pytest.mark.parametrize("update", [2, 4])
def test_checkpoints_under_fsdp_are_those_of_one_process(command_alone, command_sharded, update):
    folder, _ = command_sharded
    assert checkpoints_of(folder) == checkpoints_of(command_alone) == [2, 4]

    for name in ("model.safetensors", "moving_average.safetensors"):
        actual, expected = (
            load_file(each / f"checkpoint-{update}" / name) for each in (folder, command_alone)
        )
        assert actual.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(actual[key], weight, rtol=0, atol=1e-4)
    assert not list(folder.glob("checkpoint-*/pytorch_model_fsdp*"))


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "fsdp"])
def test_muon_in_two_processes_is_that_of_one(corpus, tmp_path, is_sharded):
    options = [*training_options(corpus, "dropout=0"), "--optimizer", "muon"]
    options += ["--save_strategy", "steps", "--save_steps", "2", "--adam_epsilon", "1e-4"]
    options = [*map(str, options), "--max_steps", "4", "--output_dir"]
    alone, together = str(tmp_path / "alone"), str(tmp_path / "together")
    train([*options, alone])

    if is_sharded:
        stopped = [*options, together, "--max_steps", "2"]
        launch_under_fsdp(tmp_path, stopped, [*options, together, "--resume"])
    else:
        launch(str(ROOT / "scripts" / "train.py"), *options, together)

    weights = [load_file(Path(folder, "model.safetensors")) for folder in (together, alone)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
