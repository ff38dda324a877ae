"""Whoever exceeds a budget says what goes instead."""

import budget


def test_nothing_is_above_its_budget():
    faults = budget.exceeded()
    assert not faults, "\n".join(faults)


def test_what_is_above_its_budget_is_named(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    body = "\n".join(["    a = 1"] * budget.LINES_OF_A_FILE)
    (tmp_path / "src" / "large.py").write_text(f"def long():\n{body}\n")
    (tmp_path / "README.md").write_text("one two\n")
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "a.diff").write_text(
        "@@ f @@ t\nodd\n- a\n- b\n+ c\n\nb\n- c\n"
    )
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "LARGER_FILES", 0)
    monkeypatch.setattr(budget, "LARGER_FUNCTIONS", 0)

    assert [number for _, number, *_ in budget.used()] == [451, 0, 0, 2, 2, 1, 1, 0]
    assert budget.exceeded() == [
        "files above 450 lines: 1, budget 0",
        "functions above 50 lines: 1, budget 0",
        "  src/large.py: 451",
        "  src/large.py:long: 451",
        budget.ADVICE,
    ]
