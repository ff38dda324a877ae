"""The `vanilla-transformer` command: parse, call one function, print.

Importing it loads no torch, so `--help` and a mistyped option are answered immediately.
"""


def main(argv: list[str] | None = None) -> None:
    """Runs the command named by the first argument."""
    from vanilla_transformer_tools.commands.__main__ import main as run_command

    run_command(argv)
