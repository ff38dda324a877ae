"""The lists of defects for `checks/check_mutants.py`; `make test-mutants` sees all caught."""

import ast
import textwrap
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from check_mutants import (
    MUTANTS,
    ROOT,
    Mutant,
    choose_tests,
    find_places,
    find_tests,
    load_mutants,
    load_record,
    read_mutants,
    save_record,
    take_share,
)

CODE = """
LIMIT = 10

class Beam:
    width: int = 4

    def best(self, scores):
        for score in scores:
            total = sum(
                score
            )
        return max(scores)

def best(scores):
    return max(scores)
"""


@pytest.fixture(scope="module")
def places():
    return find_places(ROOT)


@pytest.fixture(scope="module")
def mutants(places):
    return load_mutants(MUTANTS, places)


def test_each_defect_changes_one_place_and_leaves_valid_code(mutants, places):
    without_effect = []
    for mutant in mutants:
        [(place, _)] = mutant.matches(places)
        _, broken = mutant.broken(places)
        end = place.end + len(broken) - len(place.text)
        before = ast.parse(textwrap.dedent(place.text[place.start : place.end]))
        after = ast.parse(textwrap.dedent(broken[place.start : end]))
        if ast.dump(before) == ast.dump(after):
            without_effect.append(mutant.name)
    assert without_effect == []


def test_names_of_defects_are_unique(mutants):
    counts = Counter(mutant.name for mutant in mutants)
    assert [name for name, count in counts.items() if count > 1] == []


def test_tests_to_run_exist(mutants):
    names = {name for mutant in mutants for name in mutant.tests}
    assert [name for name in sorted(names) if not find_tests(name)] == []
    assert all(mutant.tests for mutant in mutants)


def broken(root, where, old, new=""):
    """What is left of `CODE` in a file with a defect."""
    (root / "src").mkdir(exist_ok=True)
    (root / "src" / "search.py").write_text(CODE, encoding="utf-8")
    mutant = Mutant("any", where, textwrap.dedent(old), textwrap.dedent(new), ("test_any",))
    path, text = mutant.broken(find_places(root))
    assert path == Path("src/search.py")
    return text


@pytest.mark.parametrize(
    ("where", "old"),
    [
        ("Beam.best", "max(scores)"),
        ("search:Beam.best", "max(scores)"),
        ("Beam", "= 4"),
        ("LIMIT", "10"),
    ],
)
def test_place_is_a_method_a_class_or_a_constant(tmp_path, where, old):
    assert broken(tmp_path, where, old, "0") == CODE.replace(old, "0", 1)


def test_indentation_of_several_lines_is_that_of_the_first(tmp_path):
    text = broken(tmp_path, "Beam.best", "total = sum(\nscore\n)", "if score:\n    total = 0")

    assert "            if score:\n                total = 0\n        return" in text


def test_list_has_a_header_of_place_and_tests_for_the_names_that_follow():
    text = "# A section.\n\n@@ f @@ test_a test_b\n--x is lost\n- x\n+ y\n\nb\n- if x:\n-     y\n"

    assert list(read_mutants(f"{text}\n@@ C.g @@ test_c\nc\n- z\n")) == [
        Mutant("--x is lost", "f", "x", "y", ("test_a", "test_b")),
        Mutant("b", "f", "if x:\n    y", "", ("test_a", "test_b")),
        Mutant("c", "C.g", "z", "", ("test_c",)),
    ]


@pytest.mark.parametrize(("old", "count"), [("no such code", 0), ("return", 2)])
def test_old_code_that_does_not_occur_once_is_refused(tmp_path, old, count):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "any.py").write_text("def f():\n    return 1\n    return 2\n")
    (tmp_path / "any.diff").write_text(f"@@ f @@ test_any\nlost\n- {old}\n")

    with pytest.raises(ValueError, match=f"lost: {count} times"):
        load_mutants(tmp_path, find_places(tmp_path))


def test_test_that_caught_a_mutant_before_is_run_first():
    mutant = Mutant("any", "f", "x", "y", ("test_mutants", "test_files"))
    files = ["tests/checks/test_mutants.py", "tests/test_files.py"]

    assert choose_tests(mutant, {}) == [files]
    assert choose_tests(mutant, {"any": "test_gone::test_it"}) == [files]
    assert choose_tests(mutant, {"any": "test_files::test_it[a-1]"}) == [
        ["tests/test_files.py::test_it[a-1]"],
        files,
    ]


def test_record_keeps_what_was_not_tried_and_forgets_what_is_gone(tmp_path):
    mutants = [Mutant(name, "f", "x", "y", ()) for name in ("tried", "not tried", "survived")]
    save_record(tmp_path, [*mutants, Mutant("gone", "f", "x", "y", ())], {"gone": "tests/a.py::b"})
    save_record(tmp_path, mutants, {"not tried": "tests/a.py::b"})

    save_record(tmp_path, mutants, {"tried": "tests/any/test_c.py::test_it[a::b]"})

    assert load_record(tmp_path) == {"not tried": "a::b", "tried": "test_c::test_it[a::b]"}


def test_shares_together_take_each_mutant_once():
    mutants = list(range(10))

    shares = [take_share(mutants, f"{first}/3") for first in (1, 2, 3)]

    assert shares[1] == [1, 4, 7]
    assert sorted(chain(*shares)) == mutants


@pytest.mark.parametrize("share", ["0/3", "4/3", "2", "1/0", "a/b"])
def test_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=f"1 <= I <= N, such as 2/6, got '{share}'"):
        take_share([], share)
