"""Recipes: YAML files with the options of a training run.

Each line is one option without its dashes; `config` is a mapping.
"""

import json
import re
from collections.abc import Container
from dataclasses import fields
from pathlib import Path
from typing import Any

from vanilla_transformer_tools.settings import TrainSettings

_SUFFIXES = (".yaml", ".yml")
_BOOLEAN = "tag:yaml.org,2002:bool"


def insert_recipe(argv: list[str], kind: type[TrainSettings] = TrainSettings) -> list[str]:
    """Replaces a recipe, which may be the first argument, by its options.

    The arguments after it take precedence.

    Args:
        argv: Arguments after the name of the command.
        kind: Class of the command's settings.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a YAML mapping of options to values.
    """
    if not argv or not argv[0].endswith(_SUFFIXES):
        return argv
    import yaml

    from vanilla_transformer_tools.files import parse_yaml, read_text

    class Loader(yaml.SafeLoader):
        """Leaves `yes` and `no` as words: the code of Norwegian, strategies of Trainer."""

    Loader.yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] != _BOOLEAN]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(_BOOLEAN, re.compile("(?i:true|false|on|off)$"), list("tTfFoO"))
    path = Path(argv[0])
    try:
        recipe = parse_yaml(read_text(path), Loader)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(
            f"{path} must hold options and their values, such as `preset: tiny`, got {recipe!r:.60}"
        )
    switches = {field.name for field in fields(kind) if field.type is bool}
    for name in switches & recipe.keys():
        recipe[name] = Loader.bool_values.get(str(recipe[name]).lower(), recipe[name])
    options = [
        word for name, value in recipe.items() for word in _words(path, name, value, switches)
    ]
    return options + argv[1:]


def _words(path: Path, name: object, value: Any, switches: Container[object]) -> list[str]:
    """An option as on the command line."""
    if isinstance(value, dict) and name == "config":
        value = [
            f"{field}={setting if isinstance(setting, str) else json.dumps(setting)}"
            for field, setting in value.items()
        ]
    if name in switches and isinstance(value, bool):
        return [f"--{name}"] if value else []
    values = value if isinstance(value, list) else [value]
    if not values or any(item is None or isinstance(item, list | dict) for item in values):
        raise ValueError(
            f"{path}: {name!r} must have a value or a list of values, got {value!r:.60}"
        )
    return [f"--{name}", *map(str, values)]
