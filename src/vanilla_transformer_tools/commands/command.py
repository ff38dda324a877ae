"""What commands share: parser, exit statuses, messages, and loading a translator."""

import argparse
import difflib
import gc
import io
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

from transformers.hf_argparser import HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer_tools.commands.recipes import insert_recipe, name_recipe
from vanilla_transformer_tools.files import looks_like_a_path
from vanilla_transformer_tools.settings import SearchSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translation, Translator


# Options of other programs, and what there is instead.
_INSTEAD = {"--device": "a GPU is used if there is one; CUDA_VISIBLE_DEVICES= (empty) hides it"}

# What is said of the numbers in outputs of a translation, if they are not 0.
_COUNTED = {
    "reached_limit": "translations were cut off at the length limit, --max_extra_tokens",
    "unknown": "unknown tokens in the translations were written as <unk>",
    "replaced_separators": "line separators in the translations were written as blanks",
}

# A command parses the arguments after its name.
Command = Callable[[list[str]], None]


def run(command: Command, argv: list[str] | None = None) -> None:
    """Runs one command; a user's mistake prints one message and ends with status 2."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:
        fail("the standard output is closed: redirect it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Messages survive any encoding of the terminal.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Progress bars of loading and saving would mix with our own output.
    disable_progress_bar()
    try:
        command(argv)
        sys.stdout.flush()
        _leave_process_group()
    except BrokenPipeError:
        # The reader of our output has stopped, as in `| head`.
        _drop_output()
        sys.exit(141)
    except KeyboardInterrupt as error:
        # The status with which shells report a signal.
        sys.exit(128 + getattr(error, "signum", signal.SIGINT))
    except Exception as error:
        words = argv
        with suppress(OSError, ValueError):
            words = insert_recipe(argv)
        message = _message(error, words)
        if message is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        fail(name_recipe(message, argv, words))


def _message(error: Exception, words: list[str]) -> str | None:
    """What a user needs to know about an error; None: it is a fault of the program.

    Args:
        error: What a command raised.
        words: Its arguments, with the options of a recipe.
    """
    said = str(error)
    # Importing the classes of a config's errors would take as long as importing torch.
    if type(error).__name__.startswith("StrictDataclass"):
        return str(error.__cause__ or error)
    # An error of Python, torch or CTranslate2.
    if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", said):
        return f"there is not enough memory; try smaller batches: {' '.join(said.split())}"
    if type(error).__name__.startswith("Dist") or "/gloo/" in said:
        return _loss_of_a_process(said)
    # The Hub's client passes on connection errors of httpx or httpx2.
    if type(error).__module__.startswith("httpx"):
        return f"the Hub cannot be reached: {error}"
    if isinstance(error, OSError) and error.strerror:
        return _of_the_system(error, words)
    if isinstance(error, ImportError):
        # An optional package is missing; the message names it.
        return " ".join(said.split())
    if not isinstance(error, (ValueError, OSError, ArithmeticError)):
        return None
    # From a data loader's process, torch passes it on behind a traceback, whose code is indented.
    found = re.match(r"Caught (\w+) in DataLoader.*\n +[^\n]*\n\1: (.*)", said, re.DOTALL)
    return found[2].rstrip() if found else said


def _of_the_system(error: OSError, words: list[str]) -> str:
    """What the system refuses; of a file with its option, and with a similar name if it is missing.

    Args:
        error: With the system's words.
        words: Arguments, among which the file may be.
    """
    if error.filename is None:
        return str(error.strerror)
    named = lost = Path(os.fsdecode(error.filename))
    fault = f"{str(named)!r} cannot be used: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        # The file, or the first of its folders that is missing.
        *_, lost = [named, *(folder for folder in named.parents if not folder.exists())]
        fault = f"there is no file or folder {str(lost)!r}"
        names = os.listdir(lost.parent) if lost.parent.is_dir() else []
        if similar := difflib.get_close_matches(lost.name, names, n=1):
            fault += f"; did you mean {str(lost.with_name(similar[0]))!r}?"
    option = ""
    for word in (part for each in words for part in each.split("=", 1)):
        if Path(word) in (named, lost):
            return option + fault
        option = f"{word}: " if word.startswith("--") else option
    return fault


def _loss_of_a_process(said: str) -> str:
    """Message for an error of gloo, of NCCL, or of the store where processes meet."""
    # Gloo begins with a place in its source, and ends with advice.
    reason = re.sub(r"^\[\S+\] ", "", said).splitlines()[0].partition(". ")[0]
    return (
        f"lost another process: {reason}. It has ended, or did not answer for --ddp_timeout "
        "seconds; its own output may say why. --resume continues from the last checkpoint."
    )


def _leave_process_group() -> None:
    """Ends the exchange with other processes, whose threads can abort an interpreter that exits."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        # Torch joins those threads with Python's lock held, and they need it to drop a tensor.
        time.sleep(0.1)
        distributed.destroy_process_group()


def _drop_output() -> None:
    """Discards standard output, which Python would otherwise flush at exit, and fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str) -> NoReturn:
    """Prints a message and ends the program with status 2."""
    print(f"vanilla-transformer: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(HfArgumentParser):
    """Reports a mistake without printing the usage, which has a hundred options."""

    def error(self, message: str) -> NoReturn:
        """Lets `run` print the message, in our words, and end the program with status 2."""
        # It names each spelling of an option.
        message = re.sub(r"^argument (--\w+)\S*:", r"\1:", message)
        message = message.replace("invalid int value:", "expected a whole number, got")
        raise ValueError(message.replace("invalid float value:", "expected a number, got"))

    def print_help(self, file: Any = None) -> None:
        """Prints the help, and raises an error if that fails: argparse would ignore it."""
        print(self.format_help(), end="", file=file, flush=True)


def _add_options(parser: Parser, settings: type, within: str = "") -> None:
    """Adds an option for each field with a help text, in its group.

    Args:
        parser: Parser of a command.
        settings: A dataclass; where a field has `options_of` another one, its options come too.
        within: Field that holds such options.
    """
    for item in fields(settings):
        words = dict(item.metadata)
        if described := words.pop("options_of", None):
            _add_options(parser, described, item.name)
            continue
        if "help" not in words:
            continue
        place: Any = parser
        if title := words.pop("group", within):
            titled = {each.title: each for each in parser._action_groups}
            place = titled.get(title) or parser.add_argument_group(title)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        words["default"] = None if words.pop("of_model", False) else default
        words.pop("range", None)
        # Without the None of `int | None`.
        kind, *others = [each for each in get_args(item.type) if each is not NoneType] or [
            item.type
        ]
        kind = item.type if others or get_origin(item.type) in (list, Literal) else kind
        if get_origin(kind) is Literal:
            words["choices"] = get_args(kind)
        elif item.type is bool:
            words["action"] = "store_true"
        elif words.get("action") is not argparse.BooleanOptionalAction:
            words.setdefault("type", get_args(kind)[0] if get_origin(kind) is list else kind)
            if get_origin(kind) is list and words.get("action") != "append":
                words.setdefault("nargs", "+")
        if item.default is MISSING and item.default_factory is MISSING:
            del words["default"]
        options = dict.fromkeys([f"--{item.name}", f"--{item.name.replace('_', '-')}"])
        place.add_argument(*options, dest=f"{within}.{item.name}".lstrip("."), **words)


def _values(namespace: argparse.Namespace) -> dict[str, Any]:
    """Values by field; those of `options_of` another class are together in one."""
    values: dict[str, Any] = {}
    for dest, value in vars(namespace).items():
        field_name, _, inner = dest.partition(".")
        if inner:
            values.setdefault(field_name, {})[inner] = value
        else:
            values[dest] = value
    return values


def refuse(unknown: list[str], *parsers: Parser) -> None:
    """Reports arguments that no parser knows, options with the nearest known name.

    Raises:
        ValueError: If there is one.
    """
    known = [name.lstrip("-") for parser in parsers for name in parser._option_string_actions]
    faults = []
    for argument in unknown:
        name = argument.partition("=")[0]
        if name.startswith("--"):
            nearest = difflib.get_close_matches(name.lstrip("-"), known, n=1, cutoff=0.5)
            hint = f"did you mean --{nearest[0]}?" if nearest else "--help lists the options"
            faults.append(f"unknown option {name}; {_INSTEAD.get(name, hint)}")
    if unknown:
        fault = f"unexpected argument {unknown[0]!r}; an option, such as --{known[2]}, names it"
        raise ValueError("\n".join(faults) or fault)


def parse(parser: Parser, argv: list[str]) -> dict[str, Any]:
    """Values of the options and arguments; refuses one that is unknown."""
    namespace, unknown = parser.parse_known_args(argv)
    refuse(unknown, parser)
    return _values(namespace)


def options_among(words: Iterable[str], *parsers: Parser) -> set[str]:
    """Names of the fields that options among the arguments set, with hyphens or underscores."""
    actions = {
        spelling: action
        for parser in parsers
        for spelling, action in parser._option_string_actions.items()
    }
    spellings = (word.partition("=")[0] for word in words)
    return {actions[spelling].dest for spelling in spellings if spelling in actions}


def build_parser(command: Command, settings: type, epilog: str) -> Parser:
    """Parser of a command: its docstring is the description, fields of its settings the options."""
    parser = Parser(
        [],
        # Python's keywords have an underscore after their names.
        prog=f"vanilla-transformer {command.__name__.rstrip('_')}",
        description=command.__doc__,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    _add_options(parser, settings)
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the example, and adds defaults that are not empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # 0, which equals False, is a value.
        if action.default is False or action.default in (None, "", [], argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def parse_with_texts(parser: Parser, argv: list[str]) -> dict[str, Any]:
    """Values of the options; `text` holds the other arguments, which may come among them.

    Whatever follows `--` is text.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    namespace, unknown = parser.parse_known_intermixed_args(argv[:end])
    refuse(unknown, parser)
    return _values(namespace) | {"text": [*namespace.text, *argv[end + 1 :]]}


def check_models(parser: Parser, models: list[str] | None) -> None:
    """Refuses names that `--model` cannot have."""
    if not models:
        parser.error("--model needs the folder or the Hub name of a model")
    for model in models:
        check_folder(model)


def check_folder(name: str) -> None:
    """Refuses the name of a model if it is the path of a folder that cannot be read."""
    if looks_like_a_path(name):
        os.listdir(name)


def load_translator(settings: object, **others: Any) -> "Translator":
    """Translator of the models that the settings name.

    Fields that `SearchSettings` has become arguments of the same names.
    """
    # Without garbage collection, imports are half a second faster.
    gc.disable()
    try:
        from vanilla_transformer_tools.threads import IdleCores
        from vanilla_transformer_tools.translation import Translator
    finally:
        gc.enable()
    show_messages("translation")
    names = [item.name for item in fields(SearchSettings) if hasattr(settings, item.name)]
    values = {name: getattr(settings, name) for name in names}
    cores = IdleCores()
    values |= values.pop("search", {})
    translator = Translator.from_pretrained(values.pop("model"), **values, **others)
    cores.use()
    return translator


def show_messages(package: str) -> None:
    """Writes what one of our packages logs to standard error."""
    logger = logging.getLogger(f"vanilla_transformer_tools.{package}")
    logger.setLevel(logging.INFO)
    logger.handlers = [_StandardError()]


class _StandardError(logging.Handler):
    """Writes messages on lines of their own, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one message."""
        from tqdm import tqdm

        tqdm.write(record.getMessage(), file=sys.stderr)


class Report:
    """Counts of translations, for the end of a command."""

    def __init__(self) -> None:
        self.unknown_source: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def count(self, translation: "Translation") -> None:
        """Counts a translation and its alternatives."""
        self.unknown_source.update(translation.unknown_source)
        for each in translation.ranked:
            self.counts.update({name: int(getattr(each, name)) for name in _COUNTED})

    def show(self) -> None:
        """Writes the counts that are not 0 to standard error."""
        from vanilla_transformer_tools.text.units import most_frequent

        if count := self.unknown_source.total():
            named = most_frequent(self.unknown_source)
            print(
                f"{count:,} tokens of the sources are not in the vocabulary: {named}.",
                file=sys.stderr,
            )
        for name, words in _COUNTED.items():
            if count := self.counts[name]:
                print(f"{count:,} {words}.", file=sys.stderr)
