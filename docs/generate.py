#!/usr/bin/env python
"""Writes the parts of the documentation that are made from the source.

A part stands between `<!-- begin: made by docs/generate.py -->` and `<!-- end -->`. The address of
the repository is that of `[project.urls]` in `pyproject.toml`, in all files that name it.

Example:
  python docs/generate.py
"""

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from pictures import rows, stack

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by docs/generate.py -->\n", "<!-- end -->\n"

# Names that users import, by file; a method is named after its class.
PUBLIC = {
    "vanilla_transformer/configuration_vanilla_transformer.py": ["VanillaTransformerConfig"],
    "vanilla_transformer/modeling_vanilla_transformer.py": [
        "VanillaTransformerModel",
        "VanillaTransformerModel.forward",
        "VanillaTransformerForConditionalGeneration",
        "VanillaTransformerForConditionalGeneration.forward",
    ],
    "vanilla_transformer/tokenization_vanilla_transformer.py": [
        "VanillaTransformerTokenizer",
        "VanillaTransformerTokenizer.train",
    ],
    "vanilla_transformer_tools/training/__init__.py": ["train"],
    "vanilla_transformer_tools/evaluation/training_scores.py": ["compute_scores"],
    "vanilla_transformer_tools/translation/translator.py": [
        "Translator",
        "Translator.from_pretrained",
        "Translator.translate",
    ],
    "vanilla_transformer_tools/translation/results.py": ["Translation"],
    "vanilla_transformer_tools/search.py": ["Search"],
    "vanilla_transformer_tools/evaluation/metrics.py": [
        "score",
        "TranslationScores",
    ],
    "vanilla_transformer_tools/evaluation/significance.py": ["compare", "Comparison"],
    "vanilla_transformer_tools/interop/importing.py": ["import_model", "convert"],
    "vanilla_transformer_tools/interop/trimming.py": ["trim", "Trimmed"],
    "vanilla_transformer_tools/sharing/push.py": ["push"],
}
# The page of the config describes its arguments.
_CONFIG = next(iter(PUBLIC))
_SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples")


def layers() -> str:
    """A picture of the layers: a folder or file imports only from lower ones."""
    sys.path.insert(0, str(ROOT / "checks"))
    from floors import PLAN, TOOLS

    names = [[_place(room, TOOLS) for room in rooms] for rooms in PLAN]
    return rows("Folders and files of the two packages, in layers", names)


def _place(room: str, tools: str) -> str:
    """The folder or file of the tools, or the package, that a dotted name stands for."""
    name = room.removeprefix(f"{tools}.")
    return f"{name}.py" if (ROOT / "src" / tools / f"{name}.py").exists() else f"{name}/"


def foreign_names() -> str:
    """Tables of the names of other libraries that the plug-in touches."""
    sys.path.insert(0, str(ROOT / "checks"))
    from foreign_names import tables

    return tables()


def file_map() -> str:
    """Lists of the files in each folder of both packages: the first lines of their docstrings."""
    lists = []
    for package in ("vanilla_transformer", "vanilla_transformer_tools"):
        for folder in sorted(init.parent for init in (ROOT / "src" / package).rglob("__init__.py")):
            rows = [
                f"- `{path.name}`: {_summary(path)}"
                for path in sorted(folder.glob("*.py"))
                if path.name != "__init__.py"
            ]
            lines = [
                f"### `{folder.relative_to(ROOT / 'src')}/`\n",
                f"{_summary(folder / '__init__.py')}.\n",
                *rows,
            ]
            lists.append("\n".join(lines))
    return "\n\n".join(lists) + "\n\n"


def _summary(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".")


class _HelpAsked(Exception):  # noqa: N818  (it is no error)
    """Carries the parser of a command that was asked for its help."""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, without Trainer's options."""
    from vanilla_transformer_tools.commands.__main__ import COMMANDS
    from vanilla_transformer_tools.commands.command import Parser

    def interrupt(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise _HelpAsked(parser)

    found = {}
    with mock.patch.object(Parser, "print_help", interrupt):
        for name, command in COMMANDS.items():
            try:
                command(["--help"])
            except _HelpAsked as asked:
                found[name] = asked.args[0]
    return found


def command_line() -> str:
    """Each command with its options, their help and defaults."""
    sections = []
    # The first command that describes an option in these words.
    described: dict[str, str] = {}
    for name, parser in parsers().items():
        summary = (parser.description or "").partition("\n")[0]
        lines = [f"## `{name}`\n", f"{summary}\n"]
        for group in parser._action_groups:
            actions = [action for action in group._group_actions if action.dest != "help"]
            if actions and group.title not in ("positional arguments", "options"):
                lines.append(f"### {name}: {group.title}\n")
            elsewhere: dict[str, list[str]] = {}
            for action in actions:
                said = _describe(action)
                first = described.setdefault(said, name)
                if first == name:
                    lines.append(f"- {said}")
                else:
                    elsewhere.setdefault(first, []).append(f"`{_name(action)}`")
            for first, names in elsewhere.items():
                lines.append(f"- As in [{first}](#{first}): {', '.join(names)}")
            if actions:
                lines.append("")
        # The guides have examples.
        said = re.split(r"^examples?:$", parser.epilog or "", flags=re.MULTILINE)[0].strip()
        lines += ["```text", said, "```", ""] if said else []
        sections.append("\n".join(lines))
    return "\n".join(sections) + "\n"


def _name(action: argparse.Action) -> str:
    """Name of an option or argument, with underscores.

    argparse offers each name with hyphens, and booleans with a negation, as well.
    """
    names = [name for name in action.option_strings if name.startswith("--")]
    return names[0] if names else str(action.metavar or action.dest)


def _describe(action: argparse.Action) -> str:
    """An option or argument in Markdown."""
    said = (action.help or "").replace("%%", "%")
    code = r"--[a-z][\w-]*|'[^' ]*\*'|[\w.=/-]*\w_[\w.=/-]*\w|</?\w+>|<\w+"
    said = re.sub(code, lambda found: f"`{found[0]}`", said)
    parts = [f"**`{_name(action)}`**", said]
    if action.choices:
        parts.append(f"One of: {', '.join(f'`{choice}`' for choice in action.choices)}.")
    default = action.default
    # 0, which equals False, is a value.
    is_told = default is False or default in (None, "", [], argparse.SUPPRESS)
    if not is_told and "Default:" not in said:
        values = default if isinstance(default, list) else [default]
        parts.append(f"Default: {', '.join(f'`{value}`' for value in values)}.")
    return " ".join(parts)


def config_fields() -> str:
    """The fields of the config with types, defaults and descriptions."""
    body = _definitions(ROOT / "src" / _CONFIG)["VanillaTransformerConfig"]
    assert isinstance(body, ast.ClassDef)
    described = dict(_items(_sections(ast.get_docstring(body) or "")["Args"]))
    lines = []
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in described:
            name = ast.unparse(node.target)
            kind = ast.unparse(node.annotation)
            default = ast.unparse(node.value) if node.value else "none"
            lines.append(f"- **`{name}`** (`{kind}`, default `{default}`): {described[name]}")
    return "\n".join(lines) + "\n\n"


def api() -> str:
    """Signatures and docstrings of the names in `PUBLIC`."""
    sections = []
    for path, names in PUBLIC.items():
        module = path.removesuffix(".py").replace("/", ".")
        definitions = _definitions(ROOT / "src" / path)
        for name in names:
            level = "###" if "." in name else "##"
            lines = [f"{level} `{name}`\n"]
            if "." not in name:
                lines.append(f"In `{_public_module(module)}`.\n")
            lines += ["```python", _signature(definitions, name), "```", ""]
            docstring = ast.get_docstring(definitions[name]) or ""
            lines += _described(docstring, with_args=path != _CONFIG)
            if path == _CONFIG:
                lines.append("Its fields are on [their own page](config.md).\n")
            sections.append("\n".join(lines))
    return "\n".join(sections) + "\n"


def _public_module(module: str) -> str:
    """Where users import a name from: the package if that offers it."""
    module = module.removesuffix(".__init__")
    if module.startswith("vanilla_transformer."):
        return "vanilla_transformer"
    if module.startswith("vanilla_transformer_tools.translation."):
        return "vanilla_transformer_tools.translation"
    return module


Definition = ast.FunctionDef | ast.ClassDef


def _definitions(path: Path) -> dict[str, Definition]:
    """Functions, classes and methods of a file by qualified name."""

    def collect(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from collect(node.body, f"{prefix}{node.name}.")

    return dict(collect(ast.parse(path.read_text(encoding="utf-8")).body, ""))


def _signature(definitions: dict[str, Definition], name: str) -> str:
    """A call in Python: arguments one a line, with types and defaults."""
    node = definitions[name]
    if isinstance(node, ast.ClassDef) and f"{name}.__init__" in definitions:
        node = definitions[f"{name}.__init__"]
    if isinstance(node, ast.ClassDef):
        is_data = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        fields = [
            _field(item)
            for item in node.body
            if is_data
            and isinstance(item, ast.AnnAssign)
            and not ast.unparse(item.target).startswith("_")
        ]
        arguments, returned = fields, ""
    else:
        arguments = [
            part
            for part in _arguments(node.args)
            if not re.fullmatch(r"self|cls", part.partition(":")[0])
        ]
        is_class = name in definitions and isinstance(definitions[name], ast.ClassDef)
        returned = "" if is_class or not node.returns else f" -> {ast.unparse(node.returns)}"
    if not arguments:
        return f"{name}(){returned}"
    return "\n".join([f"{name}(", *(f"    {part}," for part in arguments), f"){returned}"])


def _field(item: ast.AnnAssign) -> str:
    """A field of a dataclass with its type and default, without its metadata."""
    default = item.value
    if isinstance(default, ast.Call):
        named = [keyword.value for keyword in default.keywords if keyword.arg == "default"]
        default = (named or default.args)[0]
    value = f" = {ast.unparse(default)}" if default else ""
    return f"{ast.unparse(item.target)}: {ast.unparse(item.annotation)}{value}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Arguments of a function as source."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    keyword = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    for argument, default in zip(positional, defaults, strict=True):
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif keyword:
        yield "*"
    for argument, default in keyword:
        yield ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _sections(docstring: str) -> dict[str, str]:
    """Text of a Google docstring by section; what comes before the first has the name ""."""
    parts = re.split(rf"^({'|'.join(_SECTIONS)}):$", docstring, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def _items(section: str) -> Iterator[tuple[str, str]]:
    """Names and descriptions of a section; lines that continue one are joined to it."""
    for item in re.split(r"^    (?=\S)", section, flags=re.MULTILINE)[1:]:
        name, _, text = " ".join(item.split()).partition(": ")
        yield name, text


def _described(docstring: str, with_args: bool) -> list[str]:
    """A docstring in Markdown."""
    sections = _sections(docstring)
    lines = [sections.pop("").strip(), ""]
    for name, text in sections.items():
        if name in ("Args", "Attributes", "Raises") and (with_args or name == "Raises"):
            lines += [f"**{name}**\n", *(f"- `{key}`: {said}" for key, said in _items(text)), ""]
        elif name.startswith("Example"):
            lines += ["```python", re.sub(r"^    ", "", text.strip("\n"), flags=re.M), "```", ""]
        elif name in ("Returns", "Yields"):
            lines += [f"**{name}** {' '.join(text.split())}", ""]
    return lines


PARTS: dict[str, Callable[[], str]] = {
    "docs/architecture.md": file_map,
    "checks/foreign_names.md": foreign_names,
    "docs/reference/command_line.md": command_line,
    "docs/reference/config.md": config_fields,
    "docs/reference/api.md": api,
}
PICTURES: dict[str, Callable[[], str]] = {"docs/stack.svg": stack, "docs/layers.svg": layers}
# Files that name the repository's address.
ADDRESSED = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "docs/install.md",
    "docs/share.md",
    "examples/from_text_to_model.ipynb",
    "examples/fine_tune_imported_model.ipynb",
    ".github/ISSUE_TEMPLATE/config.yml",
)


def address() -> str:
    """The repository's address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def rewritten(page: str) -> str:
    """A page with its generated part, or the repository's address, made anew; or a picture.

    Args:
        page: Path relative to the repository, one of `PARTS`, `PICTURES` or `ADDRESSED`.
    """
    if page in PICTURES:
        return PICTURES[page]()
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in ADDRESSED:
        owner_and_name = address().removeprefix("https://github.com/")
        return re.sub(
            r"(github(?:\.com)?/)[\w.-]+/vanilla_transformer", rf"\g<1>{owner_and_name}", text
        )
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + PARTS[page]() + END + rest.partition(END)[2]


def main() -> None:
    """Rewrites each page."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for page in (*PARTS, *PICTURES, *ADDRESSED):
        (ROOT / page).write_text(rewritten(page), encoding="utf-8")


if __name__ == "__main__":
    main()
