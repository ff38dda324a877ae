#!/usr/bin/env python
"""Every name of Transformers, torch and huggingface_hub that the plug-in touches, from its source.

A name is *private* if a part of it begins with an underscore; *undocumented* if it is imported from
a module of Transformers or the Hub and is not among the names at their top level, which the manuals
describe; and else *public*. Of torch only what is private counts, or is outside `torch`, `torch.nn`
and the modules in it.

The type of an object is not known from the source. So an attribute counts if no class of the
plug-in has one of that name, and one of Transformers that it derives from or imports does.

Example:
  python checks/foreign_names.py
"""

import argparse
import ast
import importlib
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from private_names import REASONS

LIBRARIES = ("transformers", "huggingface_hub", "torch")
DOORS = ("public", "undocumented", "private")
# Modules that pages of the manual import from, beside the top level.
DOCUMENTED = (
    *("transformers", "transformers.modeling_outputs", "transformers.utils.logging"),
    *("huggingface_hub", "huggingface_hub.dataclasses", "huggingface_hub.errors"),
)
USUAL_TORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.nn.init")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")


class Touched(NamedTuple):
    """A name of another library.

    Attributes:
        name: After its module, as in `transformers.AutoModel`, or after its class, as in
            `PreTrainedModel.post_init`; `*.name` if the class is not known.
        library: The library that it belongs to.
        how: "imported", "overridden" by a class of the plug-in, or "used", of an object.
        door: "public", "undocumented" or "private".
    """

    name: str
    library: str
    how: str
    door: str


class Source(NamedTuple):
    """A module of the plug-in, its tree, and the full names of what it imports."""

    module: str
    tree: ast.Module
    imports: dict[str, str]


@cache
def touched_names(package: str = "vanilla_transformer") -> dict[Touched, list[str]]:
    """Names of other libraries that a package touches, and the modules that do."""
    sources = list(read(package))
    found: dict[Touched, set[str]] = defaultdict(set)
    known: set[str] = set()
    for how, find in (("overridden", overridden), ("imported", imported), ("used", used)):
        added = set()
        for module, name, library in find(sources):
            # A method that is overridden is also called.
            if how == "overridden" or name.rpartition(".")[2] not in known:
                found[Touched(name, library, how, door(name))].add(module)
                added.add(name.rpartition(".")[2])
        known |= added
    return {name: sorted(found[name]) for name in sorted(found)}


def read(package: str) -> Iterator[Source]:
    """The modules of a package that Python finds."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    for file in sorted(folder.glob("**/*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imports: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    imports[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        yield Source(".".join([package, *parts]).removesuffix(".__init__"), tree, imports)


# Each of these yields modules of ours, names that they touch, and the libraries of these names.
Names = Iterator[tuple[str, str, str]]


def imported(sources: Iterable[Source]) -> Names:
    """What is imported, and what is reached through it, as `transformers.initialization.copy_`."""
    for source in sources:
        chains = chain(source.imports.values(), *map(prefixes, dotted_names(source)))
        for name in dict.fromkeys(chains):
            library = name.partition(".")[0]
            if library not in LIBRARIES or is_module(name):
                continue
            # Of members of what is imported, only private ones count.
            is_public_name = is_module(name.rpartition(".")[0])
            if is_private(name) or (is_public_name and not is_usual(name)):
                yield source.module, name, library


def overridden(sources: Iterable[Source]) -> Names:
    """Attributes and methods of their base classes that classes of the plug-in define again."""
    for source in sources:
        written = set(own_names(source.tree))
        for kind in classes(source):
            for name in sorted(vars(kind).keys() & written):
                owner = owner_of(name, kind.__mro__[1:])
                if owner and not is_special(name):
                    yield source.module, f"{owner.__qualname__}.{name}", library_of(owner)
                elif is_private(name) and (calling := caller(kind, name)):
                    yield source.module, f"{calling.__qualname__}.{name}", library_of(calling)


def used(sources: list[Source]) -> Names:
    """Attributes of objects that belong to no class of the plug-in."""
    ours = set(chain.from_iterable(own_names(source.tree) for source in sources))
    kinds = chain.from_iterable(classes(source) for source in sources)
    bases = sorted(set(chain.from_iterable(kind.__mro__[1:] for kind in kinds)), key=str)
    objects = (resolve(name) for source in sources for name in source.imports.values())
    known = sorted({found for found in objects if inspect.isclass(found)}, key=str)
    parents = list(dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in known)))
    for source in sources:
        for name in sorted(attributes(source)):
            if is_private(name):
                # Set on an object of the plug-in, it may still be a name of its base class.
                owner = owner_of(name, bases)
                if owner is None and name not in ours:
                    owner = owner_of(name, parents)
                library = library_of(owner) if owner else name not in ours and library_with(name)
            else:
                is_known = name in ours or hasattr(dict, name)
                owner = None if is_known else owner_of(name, [*bases, *parents])
                library = owner and library_of(owner)
                if library == "torch":
                    continue
            if library:
                yield source.module, f"{owner.__qualname__ if owner else '*'}.{name}", library


def attributes(source: Source) -> set[str]:
    """Names of attributes of objects, after a dot or in a call of `getattr` and its like."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and not dotted(node, source):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in BY_NAME:
            names = (each.value for each in node.args[1:2] if isinstance(each, ast.Constant))
            found.update(map(str, names))
    return {name for name in found if not is_special(name)}


def dotted_names(source: Source) -> Iterator[str]:
    """Names behind what a module imports, as `torch.cuda.is_available`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, source)):
            yield name


def dotted(node: ast.Attribute, source: Source) -> str | None:
    """The full name of an attribute of what a module imports; None: it is another's."""
    parts: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id not in source.imports:
        return None
    return ".".join([source.imports[inner.id], *reversed(parts)])


def prefixes(name: str) -> Iterator[str]:
    """The name up to its first part that is no module, and one part more if that is private."""
    parts = name.split(".")
    joined = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    outside = [prefix for prefix in joined if not is_module(prefix)]
    private = [prefix for prefix in outside[1:2] if is_private(prefix)]
    yield from private or outside[:1]


def own_names(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, fields and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif getattr(getattr(node, "value", None), "id", None) in ("self", "cls"):
                yield str(getattr(node, "attr", ""))


def classes(source: Source) -> list[type]:
    """The classes that a module defines."""
    defined = vars(importlib.import_module(source.module)).values()
    return [
        kind
        for kind in defined
        if getattr(kind, "__module__", None) == source.module and inspect.isclass(kind)
    ]


def owner_of(name: str, kinds: Iterable[type]) -> type | None:
    """The first of the libraries' classes among some that defines an attribute, or None."""
    for kind in kinds:
        fields = {**vars(kind), **vars(kind).get("__annotations__", {})}
        if library_of(kind) in LIBRARIES and name in fields and not is_private(kind.__name__):
            return kind
    return None


def caller(kind: type, name: str) -> type | None:
    """A base class of a library that calls a method which it does not define, or None."""
    for base in kind.__mro__[1:]:
        if library_of(base) == "transformers" and f"self.{name}(" in text_of(base.__module__):
            return base
    return None


@cache
def library_with(name: str) -> str | None:
    """The library whose loaded modules have a private name somewhere, or None."""
    for library in LIBRARIES:
        for module in [module for module in sys.modules if module.startswith(f"{library}.")]:
            if f".{name}" in text_of(module) or f'"{name}"' in text_of(module):
                return library
    return None


@cache
def text_of(module: str) -> str:
    """The source of a loaded module; empty if it has none."""
    file = str(getattr(sys.modules[module], "__file__", None))
    return Path(file).read_text(encoding="utf-8") if file.endswith(".py") else ""


def resolve(name: str) -> Any:
    """The object of a dotted name, or None."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last, None) if is_module(module) else None


@cache
def is_module(name: str) -> bool:
    """Whether a dotted name is that of a module of a library."""
    module, _, last = name.rpartition(".")
    if not module:
        return name in LIBRARIES
    if not is_module(module):
        return False
    found = getattr(importlib.import_module(module), last, None)
    if found is None:
        try:
            found = importlib.import_module(name)
        except ImportError:
            return False
    return isinstance(found, ModuleType) and name in sys.modules


def door(name: str) -> str:
    """Whether a name is public, undocumented or private."""
    if is_private(name):
        return "private"
    module, _, last = name.rpartition(".")
    if not is_module(module) or module.startswith("torch") or module in DOCUMENTED:
        return "public"
    top = importlib.import_module(module.partition(".")[0])
    return "public" if getattr(top, last, None) is resolve(name) else "undocumented"


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not is_special(part) for part in name.split("."))


def is_special(name: str) -> bool:
    """Whether Python gives the name its meaning."""
    return name.startswith("__")


def is_usual(name: str) -> bool:
    """Whether a name is in a module that everybody who uses torch uses."""
    return name.rpartition(".")[0] in USUAL_TORCH


def library_of(kind: type) -> str:
    """The library that defines a class."""
    return kind.__module__.partition(".")[0]


def counts(found: Iterable[Touched]) -> str:
    """A table: names of each library by door."""
    counted = Counter((touched.library, touched.door) for touched in found)
    rows = [
        f"| {library} | {' | '.join(str(counted[library, door]) for door in DOORS)} |"
        for library in LIBRARIES
    ]
    head = [f"| library | {' | '.join(DOORS)} |", "| --- " * 4 + "|"]
    return "\n".join([*head, *rows]) + "\n"


def tables() -> str:
    """What `checks/foreign_names.md` shows: counts, private names with reasons, and all others."""
    found = touched_names()
    lines = [counts(found), "| private name | how | in | why, and what happens without it |"]
    lines.append("| --- | --- | --- | --- |")
    for touched, modules in found.items():
        if touched.door == "private":
            files = ", ".join(f"`{short(module)}`" for module in modules)
            reason = REASONS.get(touched.name, "")
            lines.append(f"| `{touched.name}` | {touched.how} | {files} | {reason} |")
    lines += ["", "| from | undocumented and public names |", "| --- | --- |"]
    groups: dict[str, list[str]] = defaultdict(list)
    for touched in found:
        if touched.door != "private":
            place, _, last = touched.name.rpartition(".")
            groups[place].append(f"*`{last}`*" if touched.door == "undocumented" else f"`{last}`")
    lines += [f"| `{place}` | {', '.join(names)} |" for place, names in sorted(groups.items())]
    return "\n".join(lines) + "\n\n"


def short(module: str) -> str:
    """`generation` of `vanilla_transformer.generation_vanilla_transformer`."""
    return module.rpartition(".")[2].removesuffix("_vanilla_transformer")


def main() -> None:
    """Prints the tables."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(tables())


if __name__ == "__main__":
    main()
