"""The `vanilla-transformer` command: parse, call one function, print.

Importing it loads no torch, so `--help` and a mistyped option are answered immediately.
"""

import signal
import sys


def main(argv: list[str] | None = None) -> None:
    """Runs the command named by the first argument."""
    try:
        from vanilla_transformer_tools.commands.__main__ import main as run_command
    except KeyboardInterrupt:
        # No traceback, as for a later interrupt.
        sys.exit(128 + signal.SIGINT)
    run_command(argv)
