"""The script that trains a parent by Transformers alone: what it makes can be imported."""

import pytest

from vanilla_transformer_tools.commands import main

from ..support.documents import ROOT
from ..support.scripts import run_script


@pytest.mark.slow
def test_parent_is_imported_and_translates(tmp_path, capsys):
    for side in ("de", "en"):
        text = "".join(f"wort {n % 7} {side}\n" for n in range(60))
        (tmp_path / f"train.{side}").write_text(text, encoding="utf-8")

    done = run_script(
        *(ROOT / "scripts" / "train_m2m100.py", tmp_path / "parent", "--minutes", 0.01),
        *("--train", tmp_path / "train.de", tmp_path / "train.en"),
    )
    main(["import", str(tmp_path / "parent"), str(tmp_path / "imported")])

    assert done.returncode == 0
    capsys.readouterr()
    main(["translate", "--model", str(tmp_path / "imported"), "wort 3 de"])
    assert capsys.readouterr().out
