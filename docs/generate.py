#!/usr/bin/env python
"""Writes the parts of the documentation that are made from the source.

A part stands between `<!-- begin: made by docs/generate.py -->` and `<!-- end -->`.

Example:
  python docs/generate.py
"""

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by docs/generate.py -->\n", "<!-- end -->\n"


def file_map() -> str:
    """Tables of the files in each folder of both packages: the first lines of their docstrings."""
    tables = []
    for package in ("vanilla_transformer", "vanilla_transformer_tools"):
        for folder in sorted(init.parent for init in (ROOT / "src" / package).rglob("__init__.py")):
            rows = [
                f"| `{path.name}` | {_summary(path)} |"
                for path in sorted(folder.glob("*.py"))
                if path.name != "__init__.py"
            ]
            lines = [
                f"### `{folder.relative_to(ROOT / 'src')}/`\n",
                f"{_summary(folder / '__init__.py')}.\n",
                "| file | holds |",
                "| --- | --- |",
                *rows,
            ]
            tables.append("\n".join(lines))
    return "\n\n".join(tables) + "\n\n"


def _summary(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


PARTS = {"docs/architecture.md": file_map}


def rewritten(page: str) -> str:
    """A page with its generated part made anew.

    Args:
        page: Path relative to the repository, one of `PARTS`.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + PARTS[page]() + END + rest.partition(END)[2]


def main() -> None:
    """Rewrites each page."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for page in PARTS:
        (ROOT / page).write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
