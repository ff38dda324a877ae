"""What the tests of README and docs read out of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# All pages but the template of the model card, whose links are filled in later.
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
    if path.name != "model_card.md"
)
# Experiments of a certain day: only their links are kept true.
LAB = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("lab/*.md"))


def read(document: str) -> str:
    """Text of a document, named by its path from the root of the repository."""
    return (ROOT / document).read_text(encoding="utf-8")


def code_blocks(document: str, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(document), re.DOTALL | re.MULTILINE)


def without_code(document: str) -> str:
    """Text of a document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", read(document), flags=re.DOTALL | re.MULTILINE)


def blocks_and_output(document: str) -> list[tuple[str, str]]:
    """Python blocks, each with the text block right after it, which shows what it prints."""
    pattern = r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```)?"
    return re.findall(pattern, read(document), re.DOTALL | re.MULTILINE)
