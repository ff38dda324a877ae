"""`checks/floors.py`: what the rooms of the package import from one another."""

import subprocess
import sys
from pathlib import Path

import pytest

from floors import PLAN, SOURCE, circle, module_graph, room_graph, wrong_arrows

MODULES = module_graph(SOURCE)
ROOMS = room_graph(MODULES)


def test_each_room_is_on_a_floor_of_the_plan():
    assert ROOMS.keys() == {room for named in PLAN for room in named}


def test_rooms_import_only_from_floors_below():
    assert wrong_arrows(ROOMS) == []


def test_modules_import_one_another_in_no_circle():
    config, modeling = (
        f"vanilla_transformer.{part}_vanilla_transformer" for part in ("configuration", "modeling")
    )
    # An import of the model in the config is never executed: Transformers only reads it.
    executed = {**MODULES, config: MODULES[config] - {modeling}}

    assert circle(executed) == []


def test_plugin_imports_nothing_of_ours():
    assert ROOMS["vanilla_transformer"] == set()


def test_settings_import_nothing_of_ours_nor_torch():
    code = "import sys, vanilla_transformer_tools.settings; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    loaded = {name for name in done.stdout.split() if name.startswith("vanilla_transformer")}
    assert loaded == {
        "vanilla_transformer_tools",
        "vanilla_transformer_tools.search",
        "vanilla_transformer_tools.settings",
    }
    assert not {"torch", "transformers"} & set(done.stdout.split())


@pytest.mark.parametrize(
    "line",
    [
        "from vanilla_transformer_tools.training.run import train",
        "import vanilla_transformer_tools.training.run",
        "from ..training import run",
        "if TYPE_CHECKING:\n    from vanilla_transformer_tools.training.run import train",
    ],
)
def test_arrow_up_is_found_however_it_is_written(tmp_path, line):
    write(tmp_path, "text/filters.py", line)
    write(tmp_path, "training/run.py", "import torch")

    rooms = room_graph(module_graph(tmp_path))

    assert wrong_arrows(rooms) == [
        "vanilla_transformer_tools.text imports vanilla_transformer_tools.training"
    ]


def write(source: Path, name: str, text: str) -> None:
    file = source / "vanilla_transformer_tools" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
