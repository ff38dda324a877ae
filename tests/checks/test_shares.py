"""`--share` and `--share_of_files`: which tests a run of a part takes; which see a GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

from ..conftest import pytest_collection_modifyitems


def run(share: str = "1/1", files: str = "1/1") -> list[str]:
    """Tests that are left of three files."""
    items = [
        *(SimpleNamespace(path="one", name=f"quick {n}", mark="", callspec=n) for n in range(2)),
        *(SimpleNamespace(path="two", name=f"slow {n}", mark="slow", callspec=n) for n in range(3)),
        SimpleNamespace(path="two", name="slow", mark="slow"),
        SimpleNamespace(path="examples/three", name="example", mark="slow"),
    ]
    for item in items:
        item.path, item.get_closest_marker = Path(item.path), {item.mark: True}.get
    options = {"--share": share, "--share_of_files": files}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    pytest_collection_modifyitems(SimpleNamespace(getoption=options.get, hook=hook), items)
    return [item.name for item in items]


def test_shares_divide_examples_and_cases_of_slow_tests():
    assert run("1/3") == ["quick 0", "quick 1", "slow 0", "slow", "example"]
    assert run("2/3") == ["quick 0", "quick 1", "slow 1", "slow"]
    assert run("3/3") == ["quick 0", "quick 1", "slow 2", "slow"]


def test_shares_of_files_together_are_everything():
    assert {*run(files="1/2"), *run(files="2/2")} == {*run()}


def test_only_tests_that_need_a_gpu_see_one(pytestconfig):
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""

    assert is_hidden == (pytestconfig.option.markexpr.strip() != "gpu")
