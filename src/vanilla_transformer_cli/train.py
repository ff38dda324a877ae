"""The `train` command: trains a model on parallel text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from vanilla_transformer_cli.command import (
    Command,
    Parser,
    build_parser,
    check_folder,
    options_among,
    refuse,
)
from vanilla_transformer_cli.recipes import insert_recipe
from vanilla_transformer_cli.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainingArguments

    from vanilla_transformer.training.budget import Decision

Settings = TypeVar("Settings", bound=TrainSettings)

# Options with names of saved models; the last is of `distil`.
_MODELS = ("init_from", "tokenizer", "teacher")

_EXAMPLE = """Every field of Transformers' Seq2SeqTrainingArguments is an option too:
--output_dir, --num_train_epochs, --max_steps, --learning_rate, --warmup_steps,
--label_smoothing_factor, --gradient_accumulation_steps, --eval_strategy, --eval_steps, --seed,
--bf16, --report_to tensorboard and so on; --help-all lists them with our defaults.

A recipe is a YAML file with such options; options on the command line override it.

example:
  vanilla-transformer train --train train.de train.en --validation valid.de valid.en \\
      --preset tiny --output_dir runs/de-en
  vanilla-transformer train recipes/multi30k_en_de.yaml --data multi30k --output_dir runs/en-de
  vanilla-transformer train --train train.de train.en --validation valid.de valid.en --minutes 30
"""


@dataclass
class Options(Generic[Settings]):
    """What a command that trains was asked for, and what `--minutes` decided."""

    settings: Settings
    arguments: "Seq2SeqTrainingArguments"
    decisions: "list[Decision]" = field(default_factory=list)


def train(argv: list[str]) -> None:
    """Train a model and its tokenizer on parallel text."""
    if options := read_options(train, TrainSettings, _EXAMPLE, argv):
        from vanilla_transformer.training.run import train as train_model

        train_model(options.settings, options.arguments, decisions=options.decisions)


def read_options(
    command: Command, kind: type[Settings], epilog: str, argv: list[str]
) -> Options[Settings] | None:
    """Options of a command that trains; None after `--help-all`.

    Args:
        command: Its docstring is the description.
        kind: Class of our settings.
        epilog: Of the help.
        argv: Arguments after the name of the command; the first may be a recipe.
    """
    parser = build_parser(command, kind, epilog)
    parser.usage = f"{parser.prog} [RECIPE.yaml] [options]"
    parser.add_argument("--help-all", action="store_true", help="Also list Trainer's options.")
    argv = insert_recipe(argv, kind)
    namespace, others = parser.parse_known_args(argv)
    values = vars(namespace)
    help_all = values.pop("help_all")
    settings = kind(**values)
    if settings.minutes is not None and kind is not TrainSettings:
        parser.error("--minutes is an option of train alone; give --max_minutes, which cuts a run")
    if not settings.train and not help_all:
        parser.error("--train needs the training pairs")
    for name in _MODELS:
        value = getattr(settings, name, None) or []
        for model in [value] if isinstance(value, str) else value:
            check_folder(parser, f"--{name}", model)

    from transformers import Seq2SeqTrainingArguments
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer.training.recipe import recipe

    trainer_parser = Parser(
        Seq2SeqTrainingArguments, prog=parser.prog, add_help=False, allow_abbrev=False
    )
    trainer_parser.set_defaults(**recipe(settings))
    if help_all:
        print(parser.format_help() + "\n" + trainer_parser.format_help())
        return None
    arguments, unknown = trainer_parser.parse_args_into_dataclasses(
        others, return_remaining_strings=True
    )
    refuse(unknown, parser, trainer_parser)
    disable_progress_bar()
    if settings.minutes is None:
        return Options(settings, arguments)

    from vanilla_transformer.data.parallel_text import read_pairs
    from vanilla_transformer.training.budget import apply, choose, measure
    from vanilla_transformer.training.recipe import check_settings
    from vanilla_transformer.training.run import parallel_text

    def build(
        settings: Settings, decisions: "Sequence[Decision]"
    ) -> "tuple[Settings, Seq2SeqTrainingArguments]":
        settings, defaults = apply(decisions, settings)
        trainer_parser.set_defaults(**recipe(settings) | defaults)
        (arguments,) = trainer_parser.parse_args_into_dataclasses(others)
        return settings, arguments

    check_settings(settings, arguments)
    given = options_among(argv, parser, trainer_parser)
    pairs = read_pairs(parallel_text(settings, settings.train, settings.train_split))
    if settings.tune is None:
        decisions = choose(settings, arguments, given, pairs)
    else:
        from vanilla_transformer.training.tuning import tune

        facts = partial(measure, arguments=arguments, pairs=pairs)
        settings, decisions = tune(settings, arguments, given, facts, build)
    return Options(*build(settings, decisions), decisions)
