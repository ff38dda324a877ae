"""Folders that other commits, and other releases of Transformers, have saved.

`$OTHER_PYTHON` names the interpreter of an environment with another release; `make test-oldest` and
`make test-newest` set it.
"""

import os
import sys

import pytest
from packaging.version import Version
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vanilla_transformer  # noqa: F401  (registers the classes)
from compare_releases import BEFORE, Cell, cells, faults_in, table
from saved_folders.save import results

# From this release on, code that was saved before calls `prepare_inputs_for_generation` in vain.
CACHE_RENAMED = Version("5.24.0")


def test_folder_of_an_earlier_commit_computes_the_same_in_every_mode():
    tokenizer = AutoTokenizer.from_pretrained(BEFORE)
    model = AutoModelForSeq2SeqLM.from_pretrained(BEFORE).eval()

    assert faults_in(BEFORE, results(model, tokenizer)) == {}


def is_lost(cell: Cell) -> bool:
    """Whether the code in a folder is too old for the release that loads it."""
    before = BEFORE.joinpath("COMMIT").read_text().strip()
    return (
        cell.way == "remote"
        and cell.saved_by.startswith(before)
        and Version(cell.release) >= CACHE_RENAMED
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    "OTHER_PYTHON" not in os.environ, reason="$OTHER_PYTHON names no second environment"
)
def test_folders_compute_the_same_whoever_saved_and_loads_them():
    found = list(cells([sys.executable, os.environ["OTHER_PYTHON"]]))

    print("\n" + table(found))
    assert len({cell.way for cell in found}) == 2
    assert {cell: cell.faults for cell in found if cell.faults and not is_lost(cell)} == {}
    # Searches that run here without Transformers' own still work.
    assert all({"loss", "greedy", "beams"}.isdisjoint(cell.faults) for cell in found)
