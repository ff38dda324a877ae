"""The `train` command: trains a model on parallel text."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vanilla_transformer_tools.commands.command import (
    Parser,
    build_parser,
    check_folder,
    options_among,
    refuse,
)
from vanilla_transformer_tools.commands.recipes import insert_recipe
from vanilla_transformer_tools.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainingArguments

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
    settings, arguments, given = _read_options(argv)

    from vanilla_transformer_tools.training.run import train as train_model

    train_model(settings, arguments, given=given)


def _read_options(argv: list[str]) -> tuple[TrainSettings, "Seq2SeqTrainingArguments", set[str]]:
    """Our settings, Trainer's arguments, and the names of the options that were given.

    `--help-all` ends the program.
    """
    # In bfloat16, oneDNN keeps a program of megabytes for each number of rows that it multiplied.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    parser = build_parser(train, TrainSettings, _EXAMPLE)
    parser.usage = f"{parser.prog} [RECIPE.yaml] [options]"
    parser.add_argument("--help-all", action="store_true", help="Also list Trainer's options.")
    words = insert_recipe(argv)
    namespace, others = parser.parse_known_args(words)
    values = vars(namespace)
    help_all = values.pop("help_all")
    settings = TrainSettings(**values)
    trainer_parser = _trainer_parser(parser.prog, others, settings)
    if help_all:
        print(parser.format_help() + "\n" + trainer_parser.format_help(), flush=True)
        parser.exit()
    refuse(trainer_parser.parse_known_args(others)[1], parser, trainer_parser)
    if not settings.train:
        parser.error("--train needs the training pairs")
    # What a file would be is explained later.
    for model in filter(None, (settings.init_from, settings.tokenizer)):
        if not Path(model).is_file():
            check_folder(model)
    (arguments,) = trainer_parser.parse_args_into_dataclasses(others)
    return settings, arguments, options_among(words, parser, trainer_parser)


def _trainer_parser(prog: str, words: list[str], settings: TrainSettings) -> Parser:
    """Parser of Trainer's options, with the defaults of a run that has these settings of ours."""
    from transformers import Seq2SeqTrainingArguments

    from vanilla_transformer_tools.training.options import consistent_defaults, recipe

    parser = Parser(Seq2SeqTrainingArguments, prog=prog, add_help=False, allow_abbrev=False)
    values, _ = parser.parse_known_args(words)
    given = {name: getattr(values, name) for name in options_among(words, parser)}
    parser.set_defaults(**consistent_defaults(recipe(settings), given))
    return parser
