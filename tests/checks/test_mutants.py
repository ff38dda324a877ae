"""The list of defects for `checks/check_mutants.py`; `make test-mutants` sees all caught."""

import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "checks"))

from mutation import (
    TESTS,
    FirstFailure,
    Mutant,
    load_mutants,
    path_of,
    record_tests,
    take_share,
)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "checks" / "check_mutants.py"
HUB_FILES = {
    f"vanilla_transformer/modeling/{name}_vanilla_transformer.py"
    for name in (
        "attention",
        "configuration",
        "cpu",
        "decoding",
        "generation",
        "kernels",
        "layers",
        "loss",
        "modeling",
        "packing",
        "positions",
        "search",
        "shortcuts",
    )
}
MUTANTS = [
    (file, mutant)
    for path in sorted((ROOT / "tests" / "mutants").glob("*.toml"))
    for file, rows in tomllib.loads(path.read_text("utf-8")).items()
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


@cache
def meaning(text, file):
    """What a file says, but for its layout and comments; an error if it cannot be read."""
    return yaml.safe_load(text) if file.endswith(".yaml") else ast.dump(ast.parse(text))


@each_mutant
def test_defect_changes_one_place_and_leaves_valid_code(file, mutant):
    text = Mutant(file=file, **mutant).path(ROOT).read_text("utf-8")
    assert text.count(mutant["old"]) == 1

    broken = text.replace(mutant["old"], mutant["new"])

    assert meaning(broken, file) != meaning(text, file)


def mutant_of(file, *tests):
    return Mutant("any", file, "", "", tests)


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("vanilla_transformer/modeling/loss_vanilla_transformer.py", "modeling/loss"),
        ("vanilla_transformer/modeling/modeling_vanilla_transformer.py", "modeling/parity"),
        ("vanilla_transformer/data/filters.py", "data/filters"),
        ("vanilla_transformer/files.py", "files"),
        ("vanilla_transformer_cli/lines.py", "cli/lines"),
        ("benchmarks/generation.py", "benchmarks/generation"),
        ("checks/contracts/inputs.py", "checks/contracts/inputs"),
    ],
)
def test_first_test_mirrors_the_broken_file(file, place):
    assert mutant_of(file).first_tests() == (place,)
    assert mutant_of(file, "any", "other::test_it").first_tests() == ("any", "other::test_it")


def test_broken_file_lies_below_src_or_at_the_top():
    root = Path("top")

    assert mutant_of("vanilla_transformer/files.py").path(root) == Path(
        "top/src/vanilla_transformer/files.py"
    )
    assert mutant_of("scripts/ablate.py").path(root) == Path("top/scripts/ablate.py")


def test_only_hub_files_are_tried_by_tests_beyond_their_own():
    loss = mutant_of("vanilla_transformer/modeling/loss_vanilla_transformer.py", "data/filters")
    filters = mutant_of("vanilla_transformer/data/filters.py")

    assert loss.choose_tests() == [["tests/data/test_filters.py"], [*map(path_of, TESTS)]]
    assert filters.choose_tests() == [["tests/data/test_filters.py"]]


def test_test_that_caught_a_mutant_before_is_run_first():
    filters = mutant_of("vanilla_transformer/data/filters.py")
    known = replace(filters, caught_by="tests/data/test_filters.py::test_it[a-1]")

    assert known.choose_tests() == [[known.caught_by], *filters.choose_tests()]


def test_record_keeps_what_was_not_tried_and_forgets_what_is_gone(tmp_path):
    table = '[["vanilla_transformer/files.py"]]\nold = "import errno"\nnew = ""\nname = '
    names = {"tried": "[]", "not tried": "[]", "survived": "[]", "single": '["files::test_it"]'}
    rows = [f"{table}'{name}'\ntests = {tests}\n" for name, tests in names.items()]
    (tmp_path / "any.toml").write_text("".join(rows), encoding="utf-8")
    before = {"tried": "old", "not tried": "other", "gone": "third"}
    (tmp_path / "caught_by.json").write_text(json.dumps(before), encoding="utf-8")

    record_tests(tmp_path, load_mutants(tmp_path), {"tried": "new", "single": "files::test_it"})

    assert {mutant.name: mutant.caught_by for mutant in load_mutants(tmp_path)} == {
        "tried": "new",
        "not tried": "other",
        "survived": "",
        "single": "",
    }


def test_each_test_of_a_file_runs_once_before_further_parameters():
    names = ["b.py::x[1]", "b.py::x[2]", "b.py::y[1]", "a.py::x[1]", "b.py::x[3]", "b.py::y[2]"]
    items = [SimpleNamespace(nodeid=name, path=name.partition("::")[0]) for name in names]

    FirstFailure().pytest_collection_modifyitems(items)

    assert [item.nodeid for item in items] == [
        *("b.py::x[1]", "b.py::y[1]", "b.py::x[2]", "b.py::y[2]", "b.py::x[3]"),
        "a.py::x[1]",
    ]


def test_tests_to_run_exist():
    chosen = [Mutant(file=file, **mutant).choose_tests() for file, mutant in MUTANTS]
    names = {name for runs in chosen for name in chain(*runs)}
    missing = [
        name
        for name in sorted(names)
        for place, _, case in [name.partition("::")]
        for test, _, _ in [case.partition("[")]
        if not (ROOT / place).exists()
        or (test and f"def {test}(" not in (ROOT / place).read_text("utf-8"))
    ]

    assert missing == []


def test_shares_together_take_each_mutant_once():
    mutants = list(range(10))

    shares = [take_share(mutants, f"{first}/3") for first in (1, 2, 3)]

    assert shares[1] == [1, 4, 7]
    assert sorted(chain(*shares)) == mutants


@pytest.mark.parametrize("share", ["0/3", "4/3", "2", "1/0", "a/b"])
def test_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=f"1 <= I <= N, such as 2/6, got '{share}'"):
        take_share([], share)


def check(
    folder: Path, *lines: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the script on a list of one defect, as long as it needs no run of the tests."""
    (folder / "modeling.toml").write_text(
        "\n".join(['[["vanilla_transformer/modeling/loss_vanilla_transformer.py"]]', *lines]),
        encoding="utf-8",
    )
    command = [sys.executable, SCRIPT, "--mutants", folder, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_script_refuses_words_that_no_name_has(tmp_path):
    lines = ('name = "sum"', "old = 'def forward('", "new = 'def backward('")

    finished = check(tmp_path, *lines, options=("--only", "product"))

    assert finished.returncode
    assert "'product' is in no name" in finished.stderr


def test_script_refuses_a_defect_whose_text_is_gone(tmp_path):
    finished = check(tmp_path, 'name = "lost"', 'old = "no such text"', 'new = ""')

    assert finished.returncode
    assert "lost: 0 times" in finished.stderr
