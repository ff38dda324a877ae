"""The lists of mutants for `checks/check_mutants.py`; `make test-mutants` sees all caught."""

import ast
import textwrap
from collections import Counter
from itertools import chain

import pytest

from check_mutants import (
    MUTANTS,
    ROOT,
    Mutant,
    find_places,
    find_tests,
    load_mutants,
    load_record,
    save_record,
    take_share,
)


@pytest.fixture(scope="module")
def places():
    return find_places(ROOT)


@pytest.fixture(scope="module")
def mutants(places):
    return load_mutants(MUTANTS, places)


def test_each_mutant_changes_one_place_and_leaves_valid_code(mutants, places):
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


def test_names_of_mutants_are_unique(mutants):
    counts = Counter(mutant.name for mutant in mutants)
    assert [name for name, count in counts.items() if count > 1] == []


def test_tests_to_run_exist(mutants):
    names = {name for mutant in mutants for name in mutant.tests}
    assert [name for name in sorted(names) if not find_tests(name)] == []
    assert all(mutant.tests for mutant in mutants)
    gone = []
    for name, test in load_record(MUTANTS).items():
        stem, _, case = test.partition("::")
        texts = [(ROOT / file).read_text(encoding="utf-8") for file in find_tests(stem)]
        if not any(f"def {case.partition('[')[0]}(" in text for text in texts):
            gone.append(f"{name}: run it by check_mutants.py --record, as {test} is gone")
    assert gone == []


@pytest.mark.parametrize(("old", "count"), [("no such code", 0), ("return", 2)])
def test_old_code_that_does_not_occur_once_is_refused(tmp_path, old, count):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "any.py").write_text("def f():\n    return 1\n    return 2\n")
    (tmp_path / "any.diff").write_text(f"@@ f @@ test_any\nlost\n- {old}\n")

    with pytest.raises(ValueError, match=f"lost: {count} times"):
        load_mutants(tmp_path, find_places(tmp_path))


def test_record_keeps_what_was_not_tried_and_forgets_what_is_gone(tmp_path):
    mutants = [Mutant(name, "f", "x", "y", ()) for name in ("tried", "not tried", "survived")]
    save_record(tmp_path, [*mutants, Mutant("gone", "f", "x", "y", ())], {"gone": "tests/a.py::b"})
    save_record(tmp_path, mutants, {"not tried": "tests/a.py::b"})

    save_record(tmp_path, mutants, {"tried": "tests/any/test_c.py::test_it[a::b]"})

    assert load_record(tmp_path) == {"not tried": "a::b", "tried": "test_c::test_it[a::b]"}
    save_record(tmp_path, mutants, {"tried": "tests/plugin/test_variant_grid.py::test_it[a-b]"})
    assert load_record(tmp_path)["tried"] == "test_variant_grid::test_it"


def test_shares_together_take_each_mutant_once():
    mutants = list(range(10))

    shares = [take_share(mutants, f"{first}/3") for first in (1, 2, 3)]

    assert shares[1] == [1, 4, 7]
    assert sorted(chain(*shares)) == mutants
