"""The pages for students: they run, and what they name exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from ..support.documents import ROOT, blocks_and_output, read

PAGES = ["docs/from_paper_to_code.md", "docs/common_mistakes.md"]
each_page = pytest.mark.parametrize("page", PAGES)


def links(page: str) -> list[tuple[str, str]]:
    """Text and target of every link of a page; a target that is nowhere defined is empty."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    targets = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    direct = re.findall(r"\[([^][]+)\]\(([^)]+)\)", text)
    return direct + [
        (name, targets.get(label, "")) for name, label in re.findall(r"\[([^][]+)\]\[(\w+)\]", text)
    ]


@cache
def names_in(file: Path) -> set[str]:
    """Qualified names of the functions, classes, fields and constants of a module."""

    def collect(body: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, ast.FunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                found |= {prefix + node.name, *collect(node.body, f"{prefix}{node.name}.")}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return collect(ast.parse(file.read_text(encoding="utf-8")).body, "")


def test_documents_run_and_print_what_they_show(capsys):
    blocks = blocks_and_output("docs/from_paper_to_code.md")
    namespace: dict[str, object] = {}

    with torch.random.fork_rng():
        for code, shown in blocks:
            exec(compile(code, code, "exec"), namespace)
            assert capsys.readouterr().out == shown, code

    assert len(blocks) > 20


@each_page
def test_links_lead_to_files_that_exist(page):
    targets = [target for _, target in links(page) if not target.startswith("https://")]

    assert len(targets) > 10
    assert [one for one in targets if not one or not (ROOT / "docs" / one).exists()] == []


@each_page
def test_names_in_links_to_code_exist(page):
    named = [
        (name.strip("`"), ROOT / "docs" / target)
        for name, target in links(page)
        if name.startswith("`") and target.endswith(".py")
    ]

    assert len(named) > 10
    assert [name for name, file in named if name not in names_in(file)] == []


def test_each_mistake_is_caught_by_a_test():
    entries = re.split(r"^### \d+\. ", read("docs/common_mistakes.md"), flags=re.MULTILINE)[1:]

    assert 15 <= len(entries) <= 25
    for entry in entries:
        assert re.search(r"\*You see\*.*\*Why:\*.*\*Tests?:\*\s\[`test_\w+`\]", entry, re.DOTALL), (
            entry
        )
