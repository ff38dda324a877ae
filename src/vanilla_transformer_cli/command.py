"""What the commands share: their parser, how a mistake ends them, and loading a translator."""

import argparse
import difflib
import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.hf_argparser import HfArgumentParser

from vanilla_transformer_cli.settings import AttentionSettings, SearchSettings

if TYPE_CHECKING:
    from vanilla_transformer.translation import Translator

# A command parses its arguments, those after its name.
Command = Callable[[list[str]], None]


def run(command: Command, argv: list[str] | None = None) -> None:
    """Runs one command; a user's mistake ends it with the message alone and status 2."""
    try:
        command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads our output has seen enough, as in `| head`.
        _drop_output()
        sys.exit(141)
    except (ValueError, OSError, ArithmeticError) as error:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        fail(str(error))
    except KeyboardInterrupt as error:
        # As shells report a program that a signal has ended.
        sys.exit(128 + getattr(error, "signum", signal.SIGINT))
    except Exception as error:
        # Raised by a config; its module is as slow to import as torch.
        if type(error).__name__.startswith("StrictDataclass"):
            fail(str(error.__cause__ or error))
        # The Hub's client lets errors of its connection through, httpx or httpx2.
        if type(error).__module__.startswith("httpx"):
            fail(f"the Hub cannot be reached: {error}")
        # Python's own error, or that of torch or CTranslate2.
        said = str(error)
        if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", said):
            fail(f"there is not enough memory; smaller batches take less: {' '.join(said.split())}")
        raise


def _drop_output() -> None:
    """Sends standard output, which can no longer be written, to nowhere: Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    """Prints the message alone and ends the program with status 2."""
    print(f"vanilla-transformer: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(HfArgumentParser):
    """Tells a mistake alone, without a usage of a hundred options in front of it."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        fail(message)

    def print_help(self, file: Any = None) -> None:
        """Prints the help, and raises an error if that fails: argparse would ignore it."""
        print(self.format_help(), end="", file=file, flush=True)


class _SettingsParser(Parser):
    """Our own switches take no value, which might be the text that follows them."""

    @staticmethod
    def _parse_dataclass_field(parser: argparse.ArgumentParser, field: Field[Any]) -> None:
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true", help=field.metadata["help"])
        elif "action" in field.metadata:
            parser.add_argument(f"--{field.name}", **field.metadata)
        else:
            HfArgumentParser._parse_dataclass_field(parser, field)


def refuse(unknown: list[str], *parsers: Parser) -> None:
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
        fail("\n".join(faults) or f"unexpected argument {unknown[0]!r}; --help tells the usage")


def build_parser(command: Command, settings: type, epilog: str) -> Parser:
    """Parser of a command, described by its docstring; the fields of the settings are options."""
    return _SettingsParser(
        settings,
        # Python's keywords have an underscore after their names.
        prog=f"vanilla-transformer {command.__name__.rstrip('_')}",
        description=command.__doc__,
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


def check_model(parser: Parser, models: list[str] | None) -> None:
    """Ends the program unless `--model` may name models."""
    if not models:
        parser.error("--model needs the folder or the Hub name of a model")
    for model in models:
        if looks_like_a_path(model) and not Path(model).is_dir():
            parser.error(f"--model: there is no folder {model!r}")


def looks_like_a_path(name: str) -> bool:
    """Whether a name is none of the Hub, which would only complain about its form."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def load_translator(settings: SearchSettings | AttentionSettings, **others: Any) -> "Translator":
    """Translator of the models that the settings name.

    Args:
        settings: Those that `SearchSettings` has become arguments of the same names.
        others: Further arguments.
    """
    # Thousands of modules load half a second faster if nobody looks for garbage among them.
    gc.disable()
    try:
        from transformers.utils.logging import disable_progress_bar

        from vanilla_transformer.translation import Translator
    finally:
        gc.enable()
    # Bars for loading and saving weights would stand between our own lines.
    disable_progress_bar()
    values = {
        item.name: getattr(settings, item.name)
        for item in fields(SearchSettings)
        if hasattr(settings, item.name)
    }
    try:
        return Translator.from_pretrained(values.pop("model"), **values, **others)
    except ImportError as error:
        # A missing extra; the message names it.
        fail(str(error))


def report_limited(lines: int) -> None:
    """Says on standard error how many translations were cut off, if any."""
    if lines:
        print(
            f"{lines} translations were cut off at the longest output allowed; "
            "--max_extra_tokens allows more.",
            file=sys.stderr,
        )
