"""The `attention` command: attention as a page, or as word alignments."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vanilla_transformer_tools.commands.command import (
    Parser,
    build_parser,
    check_models,
    load_translator,
    parse_with_texts,
)
from vanilla_transformer_tools.commands.outputs import check_output, write_rows
from vanilla_transformer_tools.settings import (
    DTYPE,
    SOURCE_LANGUAGE,
    TARGET_LANGUAGE,
    TRUST_REMOTE_CODE,
    DTypeName,
    option,
)

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

_EXAMPLE = """The page needs no network.

example:
  vanilla-transformer attention --model runs/de-en "Ein Hund rennt."
  vanilla-transformer attention --model runs/de-en "Ein Hund rennt." "A dog runs." \\
      --output dog.html --layer 2 --head 3
  vanilla-transformer attention --model runs/de-en --alignments test.de test.en
"""


# Options of one group in `--help`.
_picture = partial(option, group="page")
_alignments = partial(option, group="alignments")
_translation = partial(option, group="translation")


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of the command `attention`."""

    model: str | None = option("Folder or Hub name of a model.")
    output: str | None = option(
        "File to write: the page, which ends in .html; default: attention.html. With --alignments, "
        "the file for the links; default: standard output."
    )
    kind: Literal["cross", "encoder", "decoder"] = _picture(
        "Attention to show first on the page: cross-attention, or self-attention of "
        "encoder or decoder.",
        "cross",
    )
    layer: int | None = _picture(
        "Layer to show first, counted from 1. Default: the last but one, "
        "from which alignments are read."
    )
    head: int | None = _picture("Head to show first, counted from 1. Default: mean of all.")
    alignments: list[str] | None = _alignments(
        "Aligns the words of two parallel files, source and target, by cross-attention; without a "
        "target file, aligns the model's translations. Writes a line of links for each pair, such "
        "as 0-0 1-2: source-target, counted from 0.",
        nargs="+",
        metavar="FILE",
    )
    units: list[str] | None = _alignments(
        "The files of --alignments with blanks between the words, for text that has none, such as "
        "Chinese.",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
    )
    source_language: str | None = _translation(SOURCE_LANGUAGE)
    target_language: str | None = _translation(TARGET_LANGUAGE)
    num_beams: int | None = _translation(
        "Beam width of the model's own translation; 1: greedy. Default: the model's, usually 4."
    )
    dtype: DTypeName = option(DTYPE, "auto")
    trust_remote_code: bool = option(TRUST_REMOTE_CODE, False)


def attention(argv: list[str]) -> None:
    """Show what a model attends to: a page, or word alignments."""
    from vanilla_transformer_tools.files import read_lines

    parser = build_parser(attention, AttentionSettings, _EXAMPLE)
    parser.add_argument(
        "text",
        nargs="*",
        metavar="SOURCE [TARGET]",
        help="Text and its translation. Default: the model's own translation.",
    )
    values = parse_with_texts(parser, argv)
    texts = values.pop("text")
    settings = AttentionSettings(**values)
    check_models(parser, [settings.model] if settings.model else None)
    output = _check(parser, settings, texts)
    files = [*(settings.alignments or []), *(settings.units or [])]
    lines = [list(read_lines(file)) for file in files]
    if len(set(map(len, lines))) > 1:
        counts = ", ".join(
            f"{len(each):,} in {file!r}" for file, each in zip(files, lines, strict=True)
        )
        parser.error(f"--alignments and --units need files of as many lines, got {counts}")
    # Only torch shows its attention.
    translator = load_translator(settings, engine="torch", num_beams=settings.num_beams)
    if lines:
        _align(translator, settings, lines)
    else:
        _show(translator, settings, texts, output)


def _check(parser: Parser, settings: AttentionSettings, texts: list[str]) -> Path:
    """Checks what can be checked without a model; returns the page to write."""
    models = [settings.model] if settings.model else []
    files = settings.alignments or []
    if not files:
        if settings.units:
            parser.error("--units needs --alignments")
        if not 1 <= len(texts) <= 2 or not texts[0].strip():
            parser.error(f"expected a source text and at most its translation, got {texts}")
        output = Path(settings.output or "attention.html")
        if output.suffix != ".html":
            parser.error(f"--output must end in .html, got {output.name!r}")
        check_output(output, models=models)
        return output
    defaults = AttentionSettings()
    for name in ("kind", "layer", "head"):
        if getattr(settings, name) != getattr(defaults, name):
            parser.error(f"--{name} is for the attention of a text: leave it out")
    if texts:
        parser.error("--alignments excludes texts: leave them out")
    if len(files) > 2:
        parser.error(f"--alignments needs one or two files, got {len(files)}")
    if len(files) == 1 and settings.units:
        parser.error("--units needs the target file of --alignments too")
    if settings.output:
        check_output(Path(settings.output), inputs=[*files, *(settings.units or [])], models=models)
    return Path()


def _show(
    translator: "Translator", settings: AttentionSettings, texts: list[str], output: Path
) -> None:
    from vanilla_transformer_tools.files import write_lines
    from vanilla_transformer_tools.inspection.attention_maps import attention_page, read_attention

    maps = read_attention(translator, *texts)
    view = {"layer": settings.layer, "head": settings.head}
    write_lines(output, [attention_page(maps, kind=settings.kind, **view)])
    print(f"{output}: {maps.source} -> {maps.target}")


def _align(translator: "Translator", settings: AttentionSettings, lines: list[list[str]]) -> None:
    from vanilla_transformer_tools.inspection.alignments import align_words

    sources, *others = lines
    targets = others[0] if others else [each.text for each in translator.translate(sources)]
    units = (others[1], others[2]) if settings.units else None
    write_rows(settings.output, map(str, align_words(translator, sources, targets, units)))
