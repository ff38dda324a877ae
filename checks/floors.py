"""The floors of the source tree, and imports that go up or in a circle.

The plugin is one room. In the tools, each folder and each file beside these folders is a room.
"""

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PLUGIN, TOOLS = "vanilla_transformer", "vanilla_transformer_tools"
# From the ground up. A room imports only from floors below its own.
PLAN = (
    (PLUGIN,),
    (TOOLS, f"{TOOLS}.compression", f"{TOOLS}.progress", f"{TOOLS}.search"),
    (f"{TOOLS}.settings", f"{TOOLS}.files", f"{TOOLS}.threads"),
    (f"{TOOLS}.saved_folder",),
    (f"{TOOLS}.text",),
    (f"{TOOLS}.interop",),
    (f"{TOOLS}.translation", f"{TOOLS}.evaluation", f"{TOOLS}.sharing"),
    (f"{TOOLS}.training", f"{TOOLS}.inspection", f"{TOOLS}.exports"),
    (f"{TOOLS}.commands",),
)

# What each module, or each room, imports.
Graph = dict[str, set[str]]


def module_graph(source: Path) -> Graph:
    """Our modules and those of ours that each imports, in functions and for type checkers too."""
    files = {
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file
        for package in (PLUGIN, TOOLS)
        for file in source.glob(f"{package}/**/*.py")
    }
    return {
        module: set(imported(module, file, files.keys())) - {module}
        for module, file in files.items()
    }


def imported(module: str, file: Path, ours: Iterable[str]) -> Iterable[str]:
    """Modules of ours that a file imports, which is the module of that dotted name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + (file.name == "__init__.py")]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            # What is imported is a module, or a name in one.
            members = [f"{base}.{alias.name}" for alias in node.names]
            names = [member if member in ours else base for member in members]
        else:
            continue
        yield from (name for name in names if name in ours)


def room_of(module: str) -> str:
    """The room that a module is in."""
    package, *inner = module.split(".")
    return package if package == PLUGIN else ".".join([package, *inner[:1]])


def room_graph(modules: Graph) -> Graph:
    """Rooms and the other rooms that each imports from."""
    rooms: Graph = {room_of(module): set() for module in modules}
    for module, targets in modules.items():
        room = room_of(module)
        rooms[room] |= {room_of(target) for target in targets} - {room}
    return rooms


def circle(graph: Graph) -> list[str]:
    """Modules or rooms that import one another in a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def wrong_arrows(rooms: Graph) -> list[str]:
    """Imports from another room that `PLAN` does not have on a floor below."""
    floor = {room: height for height, named in enumerate(PLAN) for room in named}
    return [
        f"{room} imports {target}"
        for room, targets in sorted(rooms.items())
        for target in sorted(targets)
        if floor[target] >= floor[room]
    ]
