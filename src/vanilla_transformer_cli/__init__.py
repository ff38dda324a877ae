"""The `vanilla-transformer` command: parse, call one function, print.

It stands outside the package `vanilla_transformer`, whose import registers the model with torch
and Transformers and takes seconds: `--help` and a mistyped option must answer at once. That package
reads `settings` too, so nothing is imported here.
"""


def main(argv: list[str] | None = None) -> None:
    """Runs the command named by the first argument."""
    from vanilla_transformer_cli.__main__ import main as run_command

    run_command(argv)
