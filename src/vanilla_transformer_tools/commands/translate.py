"""The `translate` command: text in, text out."""

import sys
import time
from dataclasses import replace
from pathlib import Path

from vanilla_transformer_tools.commands.command import (
    Report,
    build_parser,
    check_models,
    load_translator,
    parse_with_texts,
)
from vanilla_transformer_tools.commands.outputs import check_output, check_room
from vanilla_transformer_tools.settings import TranslateSettings

# Seconds of translating after which a faster engine is recommended.
_LONG = 10

_EXAMPLE = """Text is read from the arguments, or line by line from --input or standard
input.

example:
  vanilla-transformer translate --model runs/de-en < in.de > out.en
  vanilla-transformer translate --model runs/de-en --input in.de --output out.en --resume
"""


def translate(argv: list[str]) -> None:
    """Translate files, arguments, standard input or typed text."""
    parser = build_parser(translate, TranslateSettings, _EXAMPLE)
    parser.add_argument("text", nargs="*", help="Lines to translate instead of standard input.")
    values = parse_with_texts(parser, argv)
    texts = values.pop("text")
    settings = TranslateSettings(**values)
    check_models(parser, settings.model)
    _check(settings, texts)

    from vanilla_transformer_tools.translation.job import planned
    from vanilla_transformer_tools.translation.loading import faster_export

    with planned(settings, texts) as job:
        if job.is_complete:
            print(f"{settings.output} is complete: {job.done:,} lines", file=sys.stderr)
            return
        if settings.tag_column:
            language = job.first_language(settings.tag_column)
            if language is None:
                # An empty input names no language, and needs no model.
                job.run(None, Report().count)
                return
            settings = replace(settings, target_language=language)
        translator = load_translator(
            settings,
            num_hypotheses=settings.n_best,
            scores=settings.scores or settings.details or settings.n_best > 1,
            details=settings.details,
        )
        report, began = Report(), time.monotonic()
        try:
            job.run(translator, report.count)
        except KeyboardInterrupt:
            if job.record and settings.input:
                print(f"stopped: --resume continues {settings.output}", file=sys.stderr)
            raise
    report.show()
    if time.monotonic() - began > _LONG:
        print(faster_export(translator.engine), end="", file=sys.stderr)


def _check(settings: TranslateSettings, texts: list[str]) -> None:
    """Rejects options that exclude each other, and an output that cannot be written."""
    faults = []
    if settings.input and texts:
        faults.append(
            f"--input and text in the arguments exclude each other, got the text {texts[0]!r} too."
        )
    if settings.prefix and settings.prefix_file:
        faults.append("--prefix and --prefix_file exclude each other; give one of them.")
    if settings.n_best < 1:
        faults.append(f"--n_best must be at least 1, got {settings.n_best}.")
    if not settings.output and sys.__stdout__ is None:
        faults.append("Standard output is closed, so that --output is needed.")
    if settings.resume and not settings.output:
        faults.append("--resume needs the --output to continue.")
    elif settings.resume and not settings.input:
        faults.append("--resume needs --input, which can be compared with that of the first run.")
    if settings.shard and not settings.input:
        faults.append(f"--shard {settings.shard} needs --input, whose lines can be counted.")
    if settings.tag_column is not None and settings.tag_column < 2:
        faults.append(
            f"--tag_column must be at least 2, since the text is in column 1, got "
            f"{settings.tag_column}."
        )
    if settings.tag_column and (settings.target_language or settings.prefix_file):
        faults.append("--tag_column excludes --target_language and --prefix_file.")
    for option in ("input", "prefix_file"):
        path = Path(getattr(settings, option) or "")
        if path.name and path.exists() and not path.is_file():
            faults.append(
                f"--{option} must be a regular file, since it is read twice, got {str(path)!r}. "
                "Text from a pipe goes to standard input."
            )
    if faults:
        raise ValueError("\n".join(faults))
    if settings.output:
        _check_output(settings, Path(settings.output))


def _check_output(settings: TranslateSettings, output: Path) -> None:
    check_output(output, inputs=[settings.input, settings.prefix_file], models=settings.model or [])
    # A device or a pipe gets no record.
    if output.is_file() or not output.exists():
        check_room(output.with_name(f"{output.name}.job.json"), "The record of --output")
