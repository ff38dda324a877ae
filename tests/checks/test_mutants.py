"""The list of defects for `checks/check_mutants.py`; `make test-mutants` sees all caught."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "checks"))

from mutation import TESTS, Mutant, choose_tests, path_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "checks" / "check_mutants.py"
HUB_FILES = {
    f"vanilla_transformer/modeling/{name}_vanilla_transformer.py"
    for name in (
        "attention",
        "configuration",
        "decoding",
        "generation",
        "kernels",
        "loss",
        "modeling",
        "packing",
        "positions",
        "search",
    )
}
MUTANTS = [
    (file, mutant)
    for file, rows in tomllib.loads((ROOT / "tests/mutants.toml").read_text("utf-8")).items()
    for mutant in rows
]
each_mutant = pytest.mark.parametrize(
    ("file", "mutant"), MUTANTS, ids=[mutant["name"] for _, mutant in MUTANTS]
)


def test_list_holds_many_defects_of_every_hub_file():
    assert len(MUTANTS) >= 40
    assert {file for file, _ in MUTANTS} >= HUB_FILES
    names = Counter(mutant["name"] for _, mutant in MUTANTS)
    assert set(names.values()) == {1}


@each_mutant
def test_defect_changes_one_place_and_leaves_valid_code(file, mutant):
    text = (ROOT / "src" / file).read_text("utf-8")
    assert text.count(mutant["old"]) == 1

    broken = text.replace(mutant["old"], mutant["new"])

    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))


def test_first_test_mirrors_the_broken_file():
    files = (
        "modeling/loss_vanilla_transformer",
        "data/filters",
        "modeling/modeling_vanilla_transformer",
    )
    mutants = [Mutant("any", f"vanilla_transformer/{file}.py", "", "") for file in files]

    assert [mutant.first_test() for mutant in mutants] == [
        "modeling/loss",
        "data/filters",
        "modeling/parity",
    ]
    assert Mutant("any", "vanilla_transformer_cli/lines.py", "", "").first_test() == "cli/lines"
    assert choose_tests(mutants) == [*TESTS, "data/filters"]


def test_tests_to_run_exist():
    firsts = {mutant["first"] for _, mutant in MUTANTS if "first" in mutant}

    assert [name for name in {*TESTS, *firsts} if not (ROOT / path_of(name)).exists()] == []


def check(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Runs the script on a list of one defect, as long as it needs no run of the tests."""
    mutants = folder / "mutants.toml"
    mutants.write_text(
        "\n".join(['[["vanilla_transformer/modeling/loss_vanilla_transformer.py"]]', *lines]),
        encoding="utf-8",
    )
    command = [sys.executable, SCRIPT, "--mutants", mutants]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_script_refuses_a_defect_whose_text_is_gone(tmp_path):
    finished = check(tmp_path, 'name = "lost"', 'old = "no such text"', 'new = ""')

    assert finished.returncode
    assert "lost: 0 times" in finished.stderr
