"""`checks/walk.py`: which functions a command enters."""

import sys

import walk

from ..support.documents import ROOT


def test_walk_counts_functions_files_and_returns(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["walk.py", "--list", "translate", "--model", "nowhere", "a"])

    status = walk.main()

    *stays, figures = capsys.readouterr().out.splitlines()
    files = [stay.split(":")[0] for stay in stays]
    functions = sum(len(stay.split(" > ")) for stay in stays)
    assert status == 2
    assert all((ROOT / "src" / file).is_file() for file in files)
    assert figures == (
        f"functions {functions}, files {len(set(files))}, stays {len(files)}, "
        f"returns {len(files) - len(set(files))}"
    )
    assert files[0] == "vanilla_transformer_tools/commands/__init__.py"
