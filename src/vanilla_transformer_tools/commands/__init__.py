"""The `vanilla-transformer` command: parse, call one function, print.

It is a package of its own because importing `vanilla_transformer` takes seconds, and `--help` or a
mistyped option must be answered at once. `vanilla_transformer` itself imports `settings` from here,
so this file imports nothing.
"""


def main(argv: list[str] | None = None) -> None:
    """Runs the command named by the first argument."""
    from vanilla_transformer_tools.commands.__main__ import main as run_command

    run_command(argv)
