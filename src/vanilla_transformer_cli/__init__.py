"""The `vanilla-transformer` command: parse, call one function, print.

It stands outside the package `vanilla_transformer`, whose import registers the model with torch
and Transformers and takes seconds: `--help` and a mistyped option must answer at once.
"""

import argparse
import difflib
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.hf_argparser import HfArgumentParser

from vanilla_transformer_cli.attention import attention
from vanilla_transformer_cli.evaluate import evaluate
from vanilla_transformer_cli.export import export
from vanilla_transformer_cli.lines import plan_translation
from vanilla_transformer_cli.recipes import insert_recipe
from vanilla_transformer_cli.settings import (
    PushSettings,
    SearchSettings,
    TrainSettings,
    TranslateSettings,
)

if TYPE_CHECKING:
    from vanilla_transformer.translation import Translator

_TRAIN_EXAMPLE = """Every field of Transformers' Seq2SeqTrainingArguments is an option too:
--output_dir, --num_train_epochs, --max_steps, --learning_rate, --warmup_steps,
--label_smoothing_factor, --gradient_accumulation_steps, --eval_strategy, --eval_steps, --seed,
--bf16, --report_to tensorboard and so on; --help-all lists them with their defaults here.

A recipe is a YAML file with such options; those on the command line win over it.

example:
  vanilla-transformer train --train train.de train.en --validation valid.de valid.en \\
      --preset tiny --output_dir runs/de-en
  vanilla-transformer train recipes/multi30k_en_de.yaml --data multi30k --output_dir runs/en-de
"""

_TRANSLATE_EXAMPLE = """Text stands in the arguments, or comes line by line from --input or
standard input.

example:
  vanilla-transformer translate --model runs/de-en < in.de > out.en
  vanilla-transformer translate --model runs/de-en --input in.de --output out.en --resume
"""

_PUSH_EXAMPLE = """Only weights, tokenizer, code, card, run.json and results.json are uploaded.

example:
  vanilla-transformer push --model runs/de-en user/de-en
"""


def main(argv: list[str] | None = None) -> None:
    """Runs the command named by the first argument."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print("usage: vanilla-transformer COMMAND [--help] [options]\n\ncommands:")
        for command, function in COMMANDS.items():
            print(f"  {command:<10} {(function.__doc__ or '').splitlines()[0]}")
    elif name not in COMMANDS:
        _fail(f"unknown command {name!r}; choose from: {', '.join(COMMANDS)}")
    else:
        run(COMMANDS[name], argv[1:])


def run(command: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Runs one command; a user's mistake ends it with the message alone and status 2."""
    try:
        command(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        # Who reads our output has seen enough, as in `| head`; Python would flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # Raised by a config; its module is as slow to import as torch.
        if type(error).__name__.startswith("StrictDataclass"):
            _fail(str(error.__cause__ or error))
        # The Hub's client lets errors of its connection through, httpx or httpx2.
        if type(error).__module__.startswith("httpx"):
            _fail(f"the Hub cannot be reached: {error}")
        raise


def _fail(message: str) -> NoReturn:
    print(f"vanilla-transformer: {message}", file=sys.stderr)
    sys.exit(2)


def train(argv: list[str]) -> None:
    """Train a model, tokenizer included, on pairs of lines."""
    parser = _parser("train", TrainSettings, _TRAIN_EXAMPLE)
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

    trainer_parser = _Parser(
        Seq2SeqTrainingArguments, prog=parser.prog, add_help=False, allow_abbrev=False
    )
    trainer_parser.set_defaults(**recipe(settings))
    if help_all:
        print(parser.format_help() + "\n" + trainer_parser.format_help())
        return
    arguments, unknown = trainer_parser.parse_args_into_dataclasses(
        others, return_remaining_strings=True
    )
    _refuse(unknown, parser, trainer_parser)
    disable_progress_bar()
    train_model(settings, arguments)


def translate(argv: list[str]) -> None:
    """Translate files, arguments, standard input or what is typed."""
    parser = _parser("translate", TranslateSettings, _TRANSLATE_EXAMPLE)
    parser.add_argument("text", nargs="*", help="Lines to translate instead of standard input.")
    # Intermixed: text may stand on both sides of an option.
    namespace, unknown = parser.parse_known_intermixed_args(argv)
    _refuse(unknown, parser)
    values = vars(namespace)
    texts = values.pop("text")
    settings = TranslateSettings(**values)
    _check_model(parser, settings)
    job = plan_translation(settings, texts)
    translator = _translator(
        settings,
        num_hypotheses=settings.n_best,
        scores=settings.scores or settings.details or settings.n_best > 1,
        details=settings.details,
    )
    report = job.run(translator)
    _report_limited(report.limited)
    if report.separators:
        print(
            f"{report.separators} line separators in the translations were written as blanks.",
            file=sys.stderr,
        )


def push(argv: list[str]) -> None:
    """Share a model on the Hugging Face Hub."""
    parser = _parser("push", PushSettings, _PUSH_EXAMPLE)
    parser.add_argument("repo_id", metavar="USER/NAME", help="Repository; made if there is none.")
    namespace, unknown = parser.parse_known_args(argv)
    _refuse(unknown, parser)
    values = vars(namespace)
    repo_id = values.pop("repo_id")
    settings = PushSettings(**values)
    if not settings.model:
        parser.error("--model needs the folder of a model")

    from vanilla_transformer.sharing.push import push as push_model

    address = push_model(
        Path(settings.model),
        repo_id,
        private=settings.private or None,
        revision=settings.revision,
        commit_message=settings.commit_message,
    )
    print(f"The model is at {address}")


class _Parser(HfArgumentParser):
    """Tells a mistake alone, without a usage of a hundred options in front of it."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        _fail(message)


class _SettingsParser(_Parser):
    """Our own switches take no value, which might be the text that follows them."""

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: Field[Any]) -> None:
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true", help=field.metadata["help"])
        elif "action" in field.metadata:
            parser.add_argument(f"--{field.name}", **field.metadata)
        else:
            HfArgumentParser._parse_dataclass_field(parser, field)


def _refuse(unknown: list[str], *parsers: _Parser) -> None:
    """Reports arguments that no parser knows, options with the nearest known name."""
    known = [name.lstrip("-") for parser in parsers for name in parser._option_string_actions]
    faults = []
    for argument in unknown:
        name = argument.partition("=")[0]
        if name.startswith("--"):
            nearest = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.5)
            hint = f"did you mean --{nearest[0]}?" if nearest else "--help lists the options"
            faults.append(f"unknown option {name}; {hint}")
    if unknown:
        _fail("\n".join(faults) or f"unexpected argument {unknown[0]!r}; --help tells the usage")


def _parser(command: str, settings: type, epilog: str) -> _Parser:
    return _SettingsParser(
        settings,
        prog=f"vanilla-transformer {command}",
        description=COMMANDS[command].__doc__,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the example, and tells the default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, [], False, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def _check_model(parser: _Parser, settings: SearchSettings) -> None:
    if not settings.model:
        parser.error("--model needs the folder or the Hub name of a model")
    for model in settings.model:
        if _looks_like_a_path(model) and not Path(model).is_dir():
            parser.error(f"--model: there is no folder {model!r}")


def _looks_like_a_path(name: str) -> bool:
    """Whether a name is none of the Hub, which would only complain about its form."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def _translator(settings: SearchSettings, **others: Any) -> "Translator":
    # Thousands of modules load half a second faster if nobody looks for garbage among them.
    gc.disable()
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer.translation import Translator

    gc.enable()
    # Bars for loading and saving weights would stand between our own lines.
    disable_progress_bar()
    values = {item.name: getattr(settings, item.name) for item in fields(SearchSettings)}
    try:
        return Translator.from_pretrained(values.pop("model"), **values, **others)
    except ImportError as error:
        # A missing extra; the message names it.
        _fail(str(error))


def _report_limited(lines: int) -> None:
    if lines:
        print(
            f"{lines} translations were cut off at the longest output allowed; "
            "--max_extra_tokens allows more.",
            file=sys.stderr,
        )


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "translate": translate,
    "evaluate": evaluate,
    "push": push,
    "export": export,
    "attention": attention,
}
