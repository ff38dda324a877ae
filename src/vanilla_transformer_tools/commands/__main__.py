"""`vanilla-transformer`, also run by `python -m vanilla_transformer_tools.commands`."""

import difflib
import sys
from importlib.metadata import version

from vanilla_transformer_tools.commands.attention import attention
from vanilla_transformer_tools.commands.command import Command, fail, run
from vanilla_transformer_tools.commands.evaluate import evaluate
from vanilla_transformer_tools.commands.export import export
from vanilla_transformer_tools.commands.import_ import import_
from vanilla_transformer_tools.commands.push import push
from vanilla_transformer_tools.commands.train import train
from vanilla_transformer_tools.commands.translate import translate

COMMANDS: dict[str, Command] = {
    "train": train,
    "translate": translate,
    "evaluate": evaluate,
    "push": push,
    "export": export,
    "import": import_,
    "attention": attention,
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command named by the first argument."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        run(print_commands, argv[1:])
    elif name == "--version":
        print(f"vanilla-transformer {version('vanilla-transformer')}")
    elif name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose from: {', '.join(COMMANDS)}"
        fail(f"unknown command {name!r}; {hint}")
    else:
        run(COMMANDS[name], argv[1:])


def print_commands(_: list[str]) -> None:
    """Prints the usage and what each command does."""
    print("usage: vanilla-transformer COMMAND [--help] [options]")
    print("       vanilla-transformer --version\n\ncommands:")
    for command, function in COMMANDS.items():
        print(f"  {command:<10} {(function.__doc__ or '').splitlines()[0]}")


if __name__ == "__main__":
    main()
