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
from vanilla_transformer.modeling_vanilla_transformer import Plain

from ..conftest import Batch, Model, build_variant, gradients, source_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path(vanilla_transformer.__file__).parent
# Oracle, grid and contracts, but for what is about chunks of logits and compared with neighbours.
TEXTBOOK = ["tests/plugin/test_parity.py", "tests/plugin/test_variant_grid.py"]
NOT_OF_A_TEXTBOOK = "not several_chunks"


@pytest.fixture
def source_without_fast_files(tmp_path: Path) -> Path:
    """A `src` whose plugin has no `fast_*` files; the tools are those of this repository."""
    for package in ("vanilla_transformer", "vanilla_transformer_tools"):
        shutil.copytree(PACKAGE.with_name(package), tmp_path / package)
    for file in (tmp_path / "vanilla_transformer").glob("fast_*.py"):
        file.unlink()
    return tmp_path


def forget_fast_files(source: Path) -> None:
    """Deletes their import too, by which Transformers finds the files to copy into a folder."""
    modeling = source / "vanilla_transformer" / "modeling_vanilla_transformer.py"
    code = modeling.read_text()
    start, end = code.index("try:\n    from .fast"), code.index("logger =")
    modeling.write_text(f"{code[:start]}Fast = Plain\n{code[end:]}")


def run_without(source: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    process = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


CODE = """
import torch
import vanilla_transformer
from vanilla_transformer.modeling_vanilla_transformer import Fast, Plain
assert Fast is Plain
config = vanilla_transformer.VanillaTransformerConfig(
    vocab_size=37, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=28, decoder_ffn_dim=28,
)
model = vanilla_transformer.VanillaTransformerForConditionalGeneration(config)
ids = torch.randint(3, 37, (2, 5))
model.train()(ids, labels=ids).loss.backward()
model.eval().generate(ids, num_beams=2, max_length=9)
"""
# But for memory, which is what fast files are for, and what Transformers itself breaks.
CONTRACTS = """
import sys, tempfile
from itertools import chain
from pathlib import Path
sys.path[:0] = ["checks", "benchmarks"]
from contracts import CHECKS, Candidate, computing, training
broken = []
for check in chain(*CHECKS.values()):
    if check in (training.never_holds_all_logits, computing.asking_leaves_a_model_that_pickles):
        continue
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(Candidate("vanilla", Path(folder)))
    except Exception as error:
        broken.append((check.__name__, repr(error)[:300]))
print(broken)
sys.exit(bool(broken))
"""


def test_package_without_fast_files_trains_and_generates(source_without_fast_files):
    run_without(source_without_fast_files, "-W", "error::UserWarning", "-c", CODE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_oracle_and_grid_hold_without_fast_files(source_without_fast_files):
    forget_fast_files(source_without_fast_files)

    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TEXTBOOK]
    run_without(source_without_fast_files, *tests, "-k", NOT_OF_A_TEXTBOOK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_contracts_hold_without_fast_files(source_without_fast_files):
    forget_fast_files(source_without_fast_files)

    run_without(source_without_fast_files, "-c", CONTRACTS)


def test_switch_of_the_config_leaves_textbook_layers(batch):
    model = build_variant(fast=False, dropout=0.1)

    assert type(model.model.computing) is Plain
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert {type(module) for module in dropouts} == {nn.Dropout}
    assert not any("kernel" in vars(module) for module in model.modules())
    assert type(build_variant().model.computing) is not Plain


def test_switch_of_the_config_changes_no_result(tiny_model: Model, batch: Batch):
    plain = Model(type(tiny_model.config)(**{**tiny_model.config.to_dict(), "fast": False}))
    plain.load_state_dict(tiny_model.state_dict())
    expected = tiny_model.generate(**source_of(batch), num_beams=3, max_length=12)

    found = plain.eval().generate(**source_of(batch), num_beams=3, max_length=12)

    assert found.tolist() == expected.tolist()
    torch.testing.assert_close(gradients(plain, batch), gradients(tiny_model, batch))
