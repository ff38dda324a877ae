"""`--share` and `--share_of_files`: which tests a run of a part takes; which see a GPU."""

import os
from types import SimpleNamespace

from ..conftest import pytest_collection_modifyitems


def run(long_lists: str, files: str) -> list[str]:
    """Tests that are left of two files, each with a long list of four cases and another test."""
    items = [
        SimpleNamespace(path=path, originalname=name, name=f"{path} {name} {case}", marked=marked)
        for path in ("one", "two")
        for name, marked, cases in (("long", True, 4), ("short", None, 1))
        for case in range(cases)
    ]
    for item in items:
        item.get_closest_marker = {"long_list": item.marked}.get
    options = {"--share": long_lists, "--share_of_files": files}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    pytest_collection_modifyitems(SimpleNamespace(getoption=options.get, hook=hook), items)
    return [item.name for item in items]


def test_shares_together_are_everything():
    shares = [run(f"{n}/2", f"{m}/2") for n in (1, 2) for m in (1, 2)]

    assert set().union(*shares) == set(run("1/1", "1/1"))


def test_only_tests_that_need_a_gpu_see_one(pytestconfig):
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""

    assert is_hidden == (pytestconfig.option.markexpr.strip() != "gpu")
