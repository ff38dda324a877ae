"""Whoever exceeds a budget says what goes instead."""

import budget


def test_nothing_is_above_its_budget():
    faults = budget.exceeded()
    assert not faults, "\n".join(faults)


def test_what_is_above_its_budget_is_named(monkeypatch, tmp_path):
    plugin = tmp_path / "src/vanilla_transformer"
    plugin.mkdir(parents=True)
    (plugin / "modeling_vanilla_transformer.py").write_text("from .stacks import Stack\n")
    (plugin / "stacks.py").write_text("import os\nfrom .modeling_vanilla_transformer import A\n")
    body = "\n".join(["    a = 1"] * budget.LINES_OF_A_FILE)
    (tmp_path / "src" / "large.py").write_text(f"def long():\n{body}\n")
    (tmp_path / "README.md").write_text("one two\n")
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "a.diff").write_text(
        "@@ f @@ t\nodd\n- a\n- b\n+ c\n\nb\n- c\n"
    )
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "LINES_OF_A_SAVED_MODEL", (2, 2))
    monkeypatch.setattr(budget, "LARGER_FILES", 0)
    monkeypatch.setattr(budget, "LARGER_FUNCTIONS", 0)

    assert [number for _, number, *_ in budget.used()] == [454, 3, 0, 3, 2, 2, 2, 1, 1, 0]
    assert budget.exceeded() == [
        "lines of a saved model's code: 3, budget 2, 1 too many",
        "files above 450 lines: 1, budget 0, 1 too many",
        "functions above 50 lines: 1, budget 0, 1 too many",
        "  src/large.py: 451",
        "  src/large.py:long: 451",
        budget.ADVICE,
    ]
