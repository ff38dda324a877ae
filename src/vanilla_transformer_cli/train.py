"""The `train` command: trains a model on parallel text."""

from vanilla_transformer_cli.command import Parser, build_parser, refuse
from vanilla_transformer_cli.recipes import insert_recipe
from vanilla_transformer_cli.settings import TrainSettings

_EXAMPLE = """Every field of Transformers' Seq2SeqTrainingArguments is an option too:
--output_dir, --num_train_epochs, --max_steps, --learning_rate, --warmup_steps,
--label_smoothing_factor, --gradient_accumulation_steps, --eval_strategy, --eval_steps, --seed,
--bf16, --report_to tensorboard and so on; --help-all lists them with our defaults.

A recipe is a YAML file with such options; options on the command line override it.

example:
  vanilla-transformer train --train train.de train.en --validation valid.de valid.en \\
      --preset tiny --output_dir runs/de-en
  vanilla-transformer train recipes/multi30k_en_de.yaml --data multi30k --output_dir runs/en-de
"""


def train(argv: list[str]) -> None:
    """Train a model and its tokenizer on parallel text."""
    parser = build_parser(train, TrainSettings, _EXAMPLE)
    parser.usage = "vanilla-transformer train [RECIPE.yaml] [options]"
    parser.add_argument("--help-all", action="store_true", help="Also list Trainer's options.")
    namespace, others = parser.parse_known_args(insert_recipe(argv))
    values = vars(namespace)
    help_all = values.pop("help_all")
    settings = TrainSettings(**values)
    if not settings.train and not help_all:
        parser.error("--train needs the training pairs")

    from transformers import Seq2SeqTrainingArguments
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer.training.recipe import recipe
    from vanilla_transformer.training.run import train as train_model

    trainer_parser = Parser(
        Seq2SeqTrainingArguments, prog=parser.prog, add_help=False, allow_abbrev=False
    )
    trainer_parser.set_defaults(**recipe(settings))
    if help_all:
        print(parser.format_help() + "\n" + trainer_parser.format_help())
        return
    arguments, unknown = trainer_parser.parse_args_into_dataclasses(
        others, return_remaining_strings=True
    )
    refuse(unknown, parser, trainer_parser)
    disable_progress_bar()
    train_model(settings, arguments)
