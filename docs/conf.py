"""Settings of Sphinx for the site, `make docs`: the pages as they are, and links to the source.

The root of the site is the root of the repository, so that every relative link between pages is
the same here, on GitHub and in a clone.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = _PROJECT["urls"]["Repository"]

project = "vanilla_transformer"
author = "The vanilla_transformer contributors"
release = version = _PROJECT["version"]
html_title = f"vanilla-transformer {release}"

extensions = ["myst_nb"]
root_doc = "docs/index"
include_patterns = ["docs/**", "examples/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
include_patterns += ["SECURITY.md", "CODE_OF_CONDUCT.md"]
exclude_patterns = [".*", "build", "runs", "src", "tests", "**/__pycache__"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# Formulas are MathML, which browsers show without a script.
html_math_renderer = "mathml"
myst_update_mathjax = False
# The notebook is shown as it is in the repository; a test runs it.
nb_execution_mode = "off"
# Quotes and hyphens are what the commands need.
smartquotes = False

html_theme = "furo"
html_theme_options = {"source_repository": ADDRESS, "source_branch": "main", "source_directory": ""}
html_copy_source = False
html_show_copyright = False
html_static_path = ["site/_static"]
html_css_files = ["site.css"]
# The first page is docs/index.html.
html_extra_path = ["site/index.html"]

# A link in Markdown, `](target)` or `[label]: target`, to a file of the repository.
_LINK = re.compile(r"(\]\(|^\[\w+\]: )(?![a-z]+:|#)([^\s)#]+)(#[^\s)]*)?", re.MULTILINE)
_ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)]+)\)", re.MULTILINE)


def _is_page(path: Path) -> bool:
    is_apart = any(path.is_relative_to(ROOT / folder) for folder in ("lab", "tests", "checks"))
    return not is_apart and path.suffix in (".md", ".ipynb", ".svg", ".png")


def _to_source(text: str, folder: Path) -> str:
    """Replaces relative links to what is no page of the site by addresses of the repository."""

    def replace(found: re.Match[str]) -> str:
        opening, target, anchor = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists() or _is_page(path):
            return found[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"{opening}{ADDRESS}/{kind}/main/{path.relative_to(ROOT).as_posix()}{anchor}"

    return _LINK.sub(replace, text)


def _navigation() -> str:
    """Toctrees made of the lists of `docs/contents.md`: one for each section, with its links."""
    trees = []
    for section in (ROOT / "docs/contents.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        entries = []
        for title, target in _ENTRY.findall(section):
            page = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
            entries.append(f"{title.replace('`', '')} </{page}>")
        caption = section.partition("\n")[0]
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", *entries]))
    return "\n".join(f"\n{tree}\n```\n" for tree in trees)


def _read(app: Any, page: str, source: list[str]) -> None:
    source[0] = _to_source(source[0], (ROOT / page).parent)
    if page == root_doc:
        source[0] += _navigation()


def _formula(writer: Any, node: Any) -> None:
    is_apart = isinstance(node, nodes.math_block)
    formula = convert(node.astext(), display="block" if is_apart else "inline")
    writer.body.append(f'<div class="math">{formula}</div>' if is_apart else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connects the rewriting of links and formulas to Sphinx."""
    app.connect("source-read", _read)
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
