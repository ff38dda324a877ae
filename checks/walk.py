#!/usr/bin/env python
"""The functions that a command enters until its result, in the order in which a reader meets them.

A function counts where it is first entered; class bodies and comprehensions do not. A stay is a
run of first entries in one file, and a return is a stay in a file that the walk had left before.
`train` is followed to its first optimizer update, other commands to their end.

Examples:
  python checks/walk.py translate --model runs/demo zwölf
  python checks/walk.py --list train --train train.de train.en --minutes 1 --output_dir runs/walk \
      --validation validation.de validation.en
"""

import argparse
import inspect
import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
# Scopes that are no functions of their own to a reader.
INNER = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class FirstUpdate(BaseException):
    """Ends `train` when its first update is about to run."""


class Walk:
    """First entries into functions below `SOURCE`, each as file and qualified name."""

    def __init__(self) -> None:
        self.entered: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Notes what `sys.setprofile` reports."""
        code = frame.f_code
        # The bodies of classes and modules keep their names in a dictionary.
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if event != "call" or code.co_name in INNER or not is_function:
            return
        if code.co_filename.startswith(str(SOURCE)):
            file = str(Path(code.co_filename).relative_to(SOURCE))
            self.entered.setdefault((file, code.co_qualname))

    def stays(self) -> list[tuple[str, list[str]]]:
        """Files in the order of the walk, each with the functions first entered there."""
        by_file = groupby(self.entered, key=lambda entry: entry[0])
        return [(file, [name for _, name in entries]) for file, entries in by_file]


def stop_at_first_update() -> None:
    """Makes the first update of any optimizer end the command."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def stop(*arguments: Any) -> None:
        raise FirstUpdate

    register_optimizer_step_pre_hook(stop)


def main() -> int:
    """Prints the figures of the walk; returns the command's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="Also print each stay.")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="Command and its options.")
    options = parser.parse_args()
    from vanilla_transformer_tools.commands import main as run

    if options.command[:1] == ["train"]:
        stop_at_first_update()
    sys.argv = ["vanilla-transformer", *options.command]
    walk = Walk()
    sys.setprofile(walk)
    try:
        status = run()
    except FirstUpdate:
        status = 0
    except SystemExit as ending:
        status = int(ending.code or 0)
    finally:
        sys.setprofile(None)
    stays = walk.stays()
    if options.list:
        for file, names in stays:
            print(f"{file}: {' > '.join(names)}")
    files = {file for file, _ in stays}
    print(
        f"functions {len(walk.entered)}, files {len(files)}, stays {len(stays)}, "
        f"returns {len(stays) - len(files)}"
    )
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
