"""The pages in Markdown: the code in them runs, and what they name exists."""

import ast
import functools
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerTokenizer

from ..support.documents import LAB, PAGES, ROOT, blocks_and_output, code_blocks, read, without_code

sys.path.insert(0, str(ROOT / "docs"))

import generate

# The numbered promises, for contributors.
PROMISES = "tests/guarantees.md"
SITE = ROOT / "build/site"


def links(page: str) -> list[tuple[str, str]]:
    """Text and target of every link of a page; a target that is nowhere defined is empty."""
    text = without_code(page)
    targets = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    direct = re.findall(r"\[([^][]+)\]\(([^)]+)\)", text)
    return direct + [
        (name, targets.get(label, "")) for name, label in re.findall(r"\[([^][]+)\]\[(\w+)\]", text)
    ]


@functools.cache
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


@pytest.mark.parametrize("page", ["docs/from_paper_to_code.md", "docs/variants_in_code.md"])
def test_documents_run_and_print_what_they_show(capsys, page):
    blocks = blocks_and_output(page)
    namespace: dict[str, object] = {}

    with torch.random.fork_rng():
        for code, shown in blocks:
            exec(compile(code, code, "exec"), namespace)
            assert capsys.readouterr().out == shown, code

    assert len(blocks) >= 9


def test_estimates_are_those_of_their_formula(capsys):
    ((code, shown),) = blocks_and_output("lab/2026-11-23_many_gpus.md")

    exec(code, {})

    assert capsys.readouterr().out == shown


def anchors(page: Path) -> set[str]:
    """What `#` in a link to a page may name: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)", without_code(str(page.relative_to(ROOT))), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def is_broken(page: str, target: str) -> bool:
    """Whether a link to a file of the repository, or to a heading of it, leads nowhere."""
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    return not target or not file.exists() or bool(anchor and anchor not in anchors(file.resolve()))


def test_links_lead_to_files_and_headings_that_exist():
    targets = [
        (page, target)
        for page in (*PAGES, *LAB, PROMISES)
        for _, target in links(page)
        if not target.startswith("https://")
    ]

    assert len(targets) > 100
    assert [link for link in targets if is_broken(*link)] == []


@pytest.mark.parametrize(
    "page",
    [
        "docs/from_paper_to_code.md",
        "docs/variants_in_code.md",
        "docs/common_mistakes.md",
        PROMISES,
    ],
)
def test_names_in_links_to_code_exist(page):
    named = [
        (name.strip("`"), (ROOT / page).parent / target)
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


def test_each_guarantee_has_a_row_with_the_tests_that_hold_it():
    promises, _, tests = read(PROMISES).partition("\n## Tests\n")
    numbers = [int(number) for number in re.findall(r"^### (\d+)\. ", promises, re.MULTILINE)]
    held = re.findall(r"^\| (\d+) \| \[`test_\w+`\]\[\w+\]", tests, re.MULTILINE)

    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 18
    assert [int(number) for number in held] == numbers


def test_each_report_of_a_user_is_open_or_held_by_tests_that_exist():
    rows = re.findall(r"^\| \d+ \|.*\| (.*) \|$", read("tests/reports.md"), re.MULTILINE)
    named = [re.findall(r"`([\w/]+)::(test_\w+)`", row) for row in rows]

    assert len(rows) >= 35
    assert all(tests or row == "open" for row, tests in zip(rows, named, strict=True))
    missing = [
        test
        for file, test in itertools.chain(*named)
        if test not in names_in(ROOT / "tests" / f"{file}.py")
    ]
    assert missing == []


def test_readme_is_read_in_five_minutes():
    assert len(read("README.md").split()) <= 650


@pytest.mark.parametrize(
    "block", [*code_blocks("README.md", "python"), *code_blocks("docs/translate.md", "python")]
)
def test_python_of_a_page_translates_with_a_saved_folder(tiny_model, tmp_path, capsys, block):
    tokenizer = VanillaTransformerTokenizer.train(["zweihundert fünf"], vocab_size=300)
    tiny_model.resize_token_embeddings(len(tokenizer))
    tiny_model.generation_config.max_length = 8
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    exec(block.replace("runs/demo", str(tmp_path)), {})

    assert capsys.readouterr().out.strip()


def test_architecture_names_files_that_exist():
    page = read("docs/architecture.md").partition(generate.BEGIN)
    prose = page[0] + page[2].partition(generate.END)[2]
    names = set(re.findall(r"`([\w./-]+(?:\.(?:py|html|md|toml|txt)|/))`", prose))
    packages = [
        ROOT / "src" / name for name in ("vanilla_transformer", "vanilla_transformer_tools")
    ]

    assert len(names) > 30
    assert not {
        name for name in names if not any((folder / name).exists() for folder in (ROOT, *packages))
    }


@pytest.mark.parametrize("page", [*generate.PARTS, *generate.PICTURES, *generate.ADDRESSED])
def test_generated_part_of_a_page_is_what_the_source_says(page):
    assert generate.rewritten(page) == read(page), "Run: python docs/generate.py"


def messages() -> list[str]:
    """Strings of the source; what is filled in is left as an ellipsis."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        part.value if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_headings_of_troubleshooting_are_messages_of_the_source():
    page = read("docs/reference/troubleshooting.md").partition("\n## Without a message")[0]
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    known = messages()

    assert len(headings) > 15
    assert [text for text in headings if not any(text in message for message in known)] == []


@pytest.mark.skipif(not SITE.exists(), reason="needs the site: make docs")
def test_site_has_all_that_it_shows():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in SITE.rglob("*.html")}
    assert '<math xmlns="' in pages["common_mistakes"]
    assert "from_text_to_model" in pages
    # A site without a network has its formulas, pictures and styles.
    fetched = r"<(?:script|img|iframe)[^>]* src=\"https?:|<link [^>]*stylesheet[^>]* href=\"https?:"
    assert [name for name, page in pages.items() if re.search(fetched, page)] == []
    assert "/blob/main/tests/" in (SITE / "docs/guarantees.html").read_text(encoding="utf-8")
