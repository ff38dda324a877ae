"""Without its fast files, or with `fast=False`, the model computes the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vanilla_transformer
from vanilla_transformer.layers_vanilla_transformer import Attention, run_kernel
from vanilla_transformer.modeling_vanilla_transformer import Backend

from ..models import Batch, Model, build_variant, gradients, source_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path(vanilla_transformer.__file__).parent
TEXTBOOK = [
    "tests/plugin/test_parity.py",
    "tests/plugin/test_variant_grid.py",
    "tests/checks/test_contracts.py",
]
# Not what is about memory, which is what fast files are for, nor about neighbours.
OF_A_TEXTBOOK = "not several_chunks and not never_holds and not neighbour"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("textbook", TEXTBOOK)
def test_oracle_grid_and_contracts_hold_without_fast_files(tmp_path, textbook):
    for package in ("vanilla_transformer", "vanilla_transformer_tools"):
        shutil.copytree(PACKAGE.with_name(package), tmp_path / package)
    plugin = tmp_path / "vanilla_transformer"
    for file in plugin.glob("fast_*.py"):
        file.unlink()

    tests = [textbook, "-q", "-p", "no:cacheprovider", "-k", OF_A_TEXTBOOK]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


def test_switch_of_the_config_leaves_textbook_layers(batch):
    model = build_variant(fast=False, dropout=0.1)

    assert type(model.model.backend) is Backend
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert {type(module) for module in dropouts} == {nn.Dropout}
    kernels = {module.kernel for module in model.modules() if isinstance(module, Attention)}
    assert kernels == {run_kernel}
    assert type(build_variant().model.backend) is not Backend


def test_switch_of_the_config_changes_no_result(tiny_model: Model, batch: Batch):
    plain = Model(type(tiny_model.config)(**{**tiny_model.config.to_dict(), "fast": False}))
    plain.load_state_dict(tiny_model.state_dict())
    expected = tiny_model.generate(**source_of(batch), num_beams=3, max_length=12)

    found = plain.eval().generate(**source_of(batch), num_beams=3, max_length=12)

    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(gradients(plain, batch), gradients(tiny_model, batch))
