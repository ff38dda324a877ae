"""The budgets of the repository: lines of code, of files and functions, mutants, and words of docs.

Run it to see what is used, before the tests do. Whoever exceeds a budget removes as much in the
same change. The aims are what the numbers shall come down to; they are lowered whenever there is
room.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADVICE = (
    "Shorten other code or pages in the same commit, and name them in its message. If you find "
    "nothing, ask in the pull request; checks/budget.py has the numbers."
)

# Budget, with room for one addition, and aim where that has not been reached.
LINES = {
    "src": (20_800, 18_000),
    "src/vanilla_transformer": (4_080, 3_500),
    "tests": (25_200, 23_000),
}
MUTANTS = (450, 450)
WORDS_OF_DOCS = (37_500, 37_500)
# The folder of a model that an earlier commit saved, with its code.
SAVED = "saved_before"
# Users read the code of a saved model before they trust it: half an hour.
LINES_OF_A_SAVED_MODEL = (2_000, 2_000)
FILES_OF_A_SAVED_MODEL = (7, 7)
LINES_OF_A_FILE = 450
LINES_OF_A_FUNCTION = 50
LINES_OF_AN_EXAMPLE = 100
# Number of files, functions and examples that are larger all the same.
LARGER_FILES = 0
LARGER_FUNCTIONS = 2
LARGER_EXAMPLES = 0


def lines(file: Path) -> int:
    """Number of lines of a file."""
    return len(file.read_text(encoding="utf-8").split("\n")) - 1


def modules(folder: str) -> list[Path]:
    """Python files of a folder and its folders, in order, without code that a saved model holds."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if SAVED not in path.parts)


def saved_files() -> list[Path]:
    """The code that a saved model carries: the model's file, and what the files import."""
    folder = ROOT / "src/vanilla_transformer"
    files = [folder / "modeling_vanilla_transformer.py"]
    # Grows meanwhile.
    for file in files:
        text = file.read_text(encoding="utf-8")
        siblings = re.findall(r"^ *from \.(\w+) import", text, re.MULTILINE)
        named = (folder / f"{name}.py" for name in dict.fromkeys(siblings))
        files += [path for path in named if path not in files]
    return files


def large_files() -> dict[str, int]:
    """Files of src with more lines than a file may have."""
    sizes = {str(file.relative_to(ROOT)): lines(file) for file in modules("src")}
    return {name: size for name, size in sizes.items() if size > LINES_OF_A_FILE}


def large_functions() -> dict[str, int]:
    """Functions of src with more lines than a function may have, docstrings included."""
    found = {}
    for file in modules("src"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > LINES_OF_A_FUNCTION:
                    found[f"{file.relative_to(ROOT)}:{node.name}"] = size
    return found


def large_examples() -> dict[str, int]:
    """Examples with more lines than one may have."""
    sizes = {str(file.relative_to(ROOT)): lines(file) for file in modules("examples")}
    return {name: size for name, size in sizes.items() if size > LINES_OF_AN_EXAMPLE}


def mutants() -> int:
    """Number of mutants, each of which begins with its description."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests/mutants").glob("*.diff")]
    # The first line of the code that it replaces; the others follow such a line.
    return sum(len(re.findall(r"^(?![-+] |@@).+\n(?=- )", text, re.MULTILINE)) for text in texts)


def words_of_docs() -> int:
    """Number of words of the README and of the manual, with its generated pages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def used() -> Iterator[tuple[str, int, int, int]]:
    """Each number with its name, its budget, and the aim that the budget shall come down to."""
    for folder, (budget, aim) in LINES.items():
        yield f"lines of {folder}", sum(map(lines, modules(folder))), budget, aim
    saved = saved_files()
    yield "lines of a saved model's code", sum(map(lines, saved)), *LINES_OF_A_SAVED_MODEL
    yield "files of a saved model's code", len(saved), *FILES_OF_A_SAVED_MODEL
    yield "mutants", mutants(), *MUTANTS
    yield "words of README and docs", words_of_docs(), *WORDS_OF_DOCS
    yield f"files above {LINES_OF_A_FILE} lines", len(large_files()), LARGER_FILES, 0
    yield (
        f"functions above {LINES_OF_A_FUNCTION} lines",
        len(large_functions()),
        LARGER_FUNCTIONS,
        0,
    )
    yield f"examples above {LINES_OF_AN_EXAMPLE} lines", len(large_examples()), LARGER_EXAMPLES, 0


def exceeded() -> list[str]:
    """What is above its budget, with the largest parts where these count."""
    faults = [
        f"{name}: {number:,}, budget {budget:,}, {number - budget:,} too many"
        for name, number, budget, _ in used()
        if number > budget
    ]
    if any(" above " in fault for fault in faults):
        parts = {**large_files(), **large_functions(), **large_examples()}
        faults += [f"  {name}: {size}" for name, size in sorted(parts.items())]
    return [*faults, ADVICE] if faults else []


if __name__ == "__main__":
    for name, number, budget, aim in used():
        print(f"{name:<40} {number:>7,} of {budget:>7,}, aim {aim:,}")
    if faults := exceeded():
        sys.exit("\n".join(faults))
