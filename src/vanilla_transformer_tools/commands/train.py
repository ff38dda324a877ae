"""The `train` command: trains a model on parallel text, with the options of a recipe if given."""

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vanilla_transformer_tools.commands.command import (
    Command,
    Parser,
    build_parser,
    check_folder,
    options_among,
    refuse,
)
from vanilla_transformer_tools.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainingArguments

Settings = TypeVar("Settings", bound=TrainSettings)

# Options with names of saved models.
_MODELS = ("init_from", "tokenizer")
_RECIPES = (".yaml", ".yml")
# Words of YAML for no value; and for truth, in the spelling that JSON and Trainer read too.
_MISSING = ("", "~", "null")
_BOOLEANS = {"true": "true", "on": "true", "false": "false", "off": "false"}

_EXAMPLE = """Every field of Transformers' Seq2SeqTrainingArguments is an option too:
--output_dir, --num_train_epochs, --max_steps, --learning_rate, --warmup_steps,
--label_smoothing_factor, --gradient_accumulation_steps, --eval_strategy, --eval_steps, --seed,
--bf16, --report_to tensorboard and so on; --help-all lists them with our defaults.

A recipe is a YAML file with such options; options on the command line override it.

example:
  vanilla-transformer train --train train.de train.en --validation valid.de valid.en \\
      --preset tiny --output_dir runs/de-en
  vanilla-transformer train recipes/multi30k_en_de.yaml --data multi30k_tok --output_dir runs/en-de
  vanilla-transformer train --train train.de train.en --validation valid.de valid.en --minutes 30
"""


def train(argv: list[str]) -> None:
    """Train a model and its tokenizer on parallel text."""
    settings, arguments, given = read_options(train, TrainSettings, _EXAMPLE, argv)

    from vanilla_transformer_tools.training.run import train as train_model

    train_model(settings, arguments, given=given)


def read_options(
    command: Command, kind: type[Settings], epilog: str, argv: list[str]
) -> tuple[Settings, "Seq2SeqTrainingArguments", set[str]]:
    """Options of a command that trains; `--help-all` ends the program.

    Args:
        command: Function of the command, whose docstring is the description.
        kind: Class of our settings.
        epilog: Text at the end of the help.
        argv: Arguments after the name of the command; the first may be a recipe.

    Returns:
        Our settings, Trainer's arguments, and the names of the options that were given.
    """
    # In bfloat16, oneDNN keeps a program of megabytes for each number of rows that it multiplied.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    parser = build_parser(command, kind, epilog)
    parser.usage = f"{parser.prog} [RECIPE.yaml] [options]"
    parser.add_argument("--help-all", action="store_true", help="Also list Trainer's options.")
    words = insert_recipe(argv, kind)
    namespace, others = parser.parse_known_args(words)
    values = vars(namespace)
    help_all = values.pop("help_all")
    settings = kind(**values)
    trainer_parser = _trainer_parser(parser.prog, others, settings)
    if help_all:
        print(parser.format_help() + "\n" + trainer_parser.format_help(), flush=True)
        parser.exit()
    unknown = trainer_parser.parse_known_args(others)[1]
    if of_recipe := [word for word in unknown if word not in argv]:
        refuse(of_recipe, parser, trainer_parser, where=f"{argv[0]}: ")
    refuse(unknown, parser, trainer_parser)
    _check_settings(parser, settings)
    arguments, unknown = trainer_parser.parse_args_into_dataclasses(
        others, return_remaining_strings=True
    )
    refuse(unknown, parser, trainer_parser)

    return settings, arguments, options_among(words, parser, trainer_parser)


def insert_recipe(argv: list[str], kind: type[TrainSettings] = TrainSettings) -> list[str]:
    """Replaces a recipe, which may be the first argument, by its options.

    A recipe is a YAML file; each line is one option without its dashes, and `config` is a mapping.
    The arguments after it take precedence.

    Args:
        argv: Arguments after the name of the command.
        kind: Class of the command's settings.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a YAML mapping of options to values.
    """
    if not argv or not argv[0].endswith(_RECIPES):
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
    switches = {field.name for field in fields(kind) if field.type is bool}
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


def _check_settings(parser: Parser, settings: TrainSettings) -> None:
    """Ends the program if it cannot train; `check_settings` finds the other mistakes."""
    if not settings.train:
        parser.error("--train needs the training pairs")
    for name in _MODELS:
        value = getattr(settings, name, None) or []
        for model in [value] if isinstance(value, str) else value:
            # What a file would be is explained later.
            if name == "tokenizer" and Path(model).is_file():
                continue
            check_folder(parser, f"--{name}", model)


def _trainer_parser(prog: str, words: list[str], settings: TrainSettings) -> Parser:
    """Parser of Trainer's options, with the defaults of a run that has these settings of ours."""
    from transformers import Seq2SeqTrainingArguments

    from vanilla_transformer_tools.training.options import consistent_defaults, recipe

    parser = Parser(Seq2SeqTrainingArguments, prog=prog, add_help=False, allow_abbrev=False)
    values, _ = parser.parse_known_args(words)
    given = {name: getattr(values, name) for name in options_among(words, parser)}
    parser.set_defaults(**consistent_defaults(recipe(settings), given))
    return parser
