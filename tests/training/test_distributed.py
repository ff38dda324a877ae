"""Two processes, launched as users launch them, train the model of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from ..modeling.test_remote_code import HUB_FILES
from ..support import train_shortly as helper
from ..support.launching import launch

pytestmark = pytest.mark.slow

# `--cpu` starts a single process, whatever `--num_processes` says; this does not ask for a GPU.
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and report of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, helper.train_shortly(folder, batch_size=4)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of two processes, by kind."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            if kind == "accelerate":
                launch(helper.__file__, folders[kind], launcher=ACCELERATE)
            else:
                launch(helper.__file__, folders[kind], "--shard")
        return folders[kind]

    return folder_of


def assert_same_weights(folder: Path, expected_folder: Path) -> None:
    actual, expected = (load_file(path / "model.safetensors") for path in (folder, expected_folder))
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, msg=lambda text, at=name: f"{at}: {text}")


both_launches = pytest.mark.parametrize("kind", ["accelerate", "fsdp"])


@both_launches
def test_two_processes_train_together(launched, kind):
    assert [report["world_size"] for report in reports(launched(kind))] == [2, 2]


@both_launches
def test_two_processes_train_the_model_of_one(launched, alone, kind):
    assert_same_weights(launched(kind), alone[0])


def test_projection_of_its_own_is_trained_under_fsdp_as_in_one_process(tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    together.mkdir()
    helper.train_shortly(alone, batch_size=4, tied=False)

    launch(helper.__file__, together, "--shard", "--untied")

    assert_same_weights(together, alone)


@both_launches
def test_two_processes_translate_like_one(launched, alone, kind):
    # Each process translates its half; both halves are gathered in both processes.
    for report in reports(launched(kind)):
        assert report["predictions"] == alone[1]["predictions"]


def test_every_weight_is_sharded_under_fsdp(launched):
    for report in reports(launched("fsdp")):
        assert report["sharded"] == report["parameters"]


def test_folder_saved_under_fsdp_holds_all_that_is_promised(launched, alone):
    saved = {path.name for path in launched("fsdp").iterdir()}

    assert saved == {path.name for path in alone[0].iterdir()} | {"report-0.json", "report-1.json"}
    assert saved >= HUB_FILES.keys()
    for name in ("config.json", *HUB_FILES):
        assert (launched("fsdp") / name).read_text() == (alone[0] / name).read_text()


def test_folder_saved_under_fsdp_loads(launched, alone):
    loaded, expected = map(AutoModelForSeq2SeqLM.from_pretrained, (launched("fsdp"), alone[0]))

    assert loaded.lm_head.weight is loaded.model.encoder.embed_tokens.weight
    ids = torch.tensor([[5, 9, 2]])
    logits = [model(input_ids=ids, decoder_input_ids=ids).logits for model in (loaded, expected)]
    torch.testing.assert_close(*logits)
