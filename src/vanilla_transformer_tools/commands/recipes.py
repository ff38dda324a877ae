"""Recipes: YAML files of options, and their mistakes."""

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from vanilla_transformer_tools.settings import TrainSettings

_SUFFIXES = (".yaml", ".yml")
# Words of YAML for no value; and for truth, in the spelling that JSON and Trainer read too.
_MISSING = ("", "~", "null")
_BOOLEANS = {"true": "true", "on": "true", "false": "false", "off": "false"}


def insert_recipe(argv: list[str]) -> list[str]:
    """Replaces a recipe, which may be the first argument, by its options.

    A recipe is a YAML file; each line is one option without its dashes, and `config` is a mapping.
    The arguments after it take precedence.

    Args:
        argv: Arguments after the name of the command.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a YAML mapping of options to values.
    """
    if not argv or not argv[0].endswith(_SUFFIXES):
        return argv
    import yaml

    from vanilla_transformer_tools.files import parse_yaml

    path = Path(argv[0])
    try:
        # Words as they are written: `no` is the code of Norwegian, too.
        recipe = parse_yaml(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(
            f"{path} must hold options and their values, such as `preset: tiny`, got {recipe!r:.60}"
        )
    switches = {field.name for field in fields(TrainSettings) if field.type is bool}
    options: list[str] = []
    for name, value in recipe.items():
        if name == "config" and isinstance(value, dict):
            value = [f"{key}={_spelling(word)}" for key, word in value.items()]
        words = value if isinstance(value, list) else [value]
        if not words or any(not isinstance(word, str) or word in _MISSING for word in words):
            raise ValueError(
                f"{path}: {name!r} must have a value or a list of values, got {value!r:.60}"
            )
        words = list(map(_spelling, words))
        is_on = yaml.SafeLoader.bool_values.get(words[0].lower())
        if name not in switches or is_on is None:
            options += [f"--{name}", *words]
        elif is_on:
            options.append(f"--{name}")
    return options + argv[1:]


def _spelling(word: object) -> str:
    return _BOOLEANS.get(str(word).lower(), str(word))


def name_recipe(message: str, argv: list[str], words: list[str]) -> str:
    """Names the recipe on each line about an option or a value that only the recipe has.

    Args:
        message: What is wrong, with options as `--name`, and values in quotes.
        argv: Arguments after the name of the command.
        words: The same with the options of the recipe.
    """
    given, known = _names(argv), _names(words)
    lines = message.split("\n")
    for number, line in enumerate(lines):
        said = _names(map("".join, re.findall(r"(--[\w-]+)|[`']([\w./-]+)[`']", line)))
        if next((name not in given for name in said if name in known), False):
            lines[number] = f"{argv[0]}: {line}"
    return "\n".join(lines)


def _names(words: Iterable[str]) -> list[str]:
    """Names of options and fields, and values, that arguments consist of."""
    return [part.lstrip("-").replace("-", "_") for word in words for part in word.split("=")]
