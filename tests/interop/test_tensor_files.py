"""Tensors from files of others: what is read, and what is refused without running anything."""

import argparse
import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vanilla_transformer_tools.interop.tensor_files import read_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}


class RunsCode:
    def __reduce__(self):
        return print, ("This must never be printed.",)


def is_equal(tensors):
    return tensors.keys() == TENSORS.keys() and all(
        torch.equal(tensor, TENSORS[name]) for name, tensor in tensors.items()
    )


FORMATS = [
    ("w.safetensors", save_file),
    ("w.pt", torch.save),
    ("w.pt", lambda one, file: torch.save(one, file, _use_new_zipfile_serialization=False)),
]


@pytest.mark.parametrize(
    ("name", "save"),
    [
        *FORMATS,
        ("w.bin", torch.save),
        ("w.pth", lambda one, file: torch.save({"epoch": 3, "state_dict": one}, file)),
        ("w.pt", lambda one, file: torch.save({"step": 3, "model": one}, file)),
        ("w.pt", lambda one, file: torch.save({"model_state_dict": one}, file)),
    ],
)
def test_tensors_are_read_from_a_file_or_its_folder(tmp_path, name, save):
    save(TENSORS, tmp_path / name)

    assert is_equal(read_tensors(tmp_path / name))
    assert is_equal(read_tensors(tmp_path))


@pytest.fixture
def shards(tmp_path):
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, tmp_path / f"{number}.safetensors")
    places = {name: f"{number}.safetensors" for number, name in enumerate(TENSORS)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


def test_shards_are_read_by_their_index_and_faults_named(shards):
    assert is_equal(read_tensors(shards))

    save_file(TENSORS, shards / "1.safetensors")
    with pytest.raises(ValueError, match=r"tensor once, got 'a' in '1\.safetensors'"):
        read_tensors(shards)
    (shards / "1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1\.safetensors"):
        read_tensors(shards)
    (shards / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json must have a `weight_map` .* Copy the model"):
        read_tensors(shards)


@pytest.mark.parametrize(("names", "got"), [([], "none"), (["a.pt", "b.pt"], "a.pt, b.pt")])
def test_folder_must_hold_one_model(tmp_path, names, got):
    for name in names:
        torch.save(TENSORS, tmp_path / name)

    with pytest.raises(ValueError, match=rf"one file of weights .*, got {got}. Name the file"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "example"),
    [
        ({**TENSORS, "extra": RunsCode()}, "print"),
        (nn.Linear(2, 2), "Linear"),
        ({"args": argparse.Namespace(hook=RunsCode())}, "print"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_objects_that_could_run_code_are_refused(tmp_path, capsys, content, example, zipped):
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)

    with pytest.raises(ValueError, match=rf"without running code, got: .*{example}.* safetensors"):
        read_tensors(tmp_path / "w.pt")

    assert "never" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "save"), FORMATS)
@pytest.mark.parametrize("kept", [0, -30])
def test_cut_file_is_refused(tmp_path, name, save, kept):
    save(TENSORS, tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])

    with pytest.raises(ValueError, match=rf"{name}' must be tensors .*\. Copy them again") as e:
        read_tensors(tmp_path / name)
    assert "weights_only" not in str(e.value)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ([1, 2], "none"),
        ({}, "none"),
        ({"a": torch.ones(2), "epoch": 3}, "'epoch': int"),
        ({0: torch.ones(2)}, "0: Tensor"),
        ({"model": {"a": torch.ones(2), "name": "x"}}, "'name': str"),
    ],
)
def test_file_without_tensors_by_name_is_refused(tmp_path, content, got):
    torch.save(content, tmp_path / "w.pt")

    with pytest.raises(ValueError, match=re.escape(f"got {got}. Save `model.state_dict()`")):
        read_tensors(tmp_path / "w.pt")
