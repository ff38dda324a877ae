"""The `attention` command: attention as a page, a picture or word alignments."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vanilla_transformer_tools.commands.command import (
    Parser,
    build_parser,
    check_model,
    load_translator,
    parse_with_texts,
)
from vanilla_transformer_tools.commands.outputs import check_output
from vanilla_transformer_tools.settings import AttentionSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.inspection.alignments import GoldAlignment
    from vanilla_transformer_tools.translation import Translator

_PICTURES = (".png", ".svg")

_EXAMPLE = """The page needs no network. Pictures need the extra plot.

example:
  vanilla-transformer attention --model runs/de-en "Ein Hund rennt."
  vanilla-transformer attention --model runs/de-en "Ein Hund rennt." "A dog runs." \\
      --output dog.svg --layer 2 --head 3
  vanilla-transformer attention --model runs/de-en --alignments test.de test.en --gold test.links
  vanilla-transformer attention --model runs/de-en --positions 128
"""


# Lines of the files of --alignments and --units, and the links of --gold.
_TextsToAlign = tuple[list[list[str]], list[list[str]], "list[GoldAlignment]"]


def attention(argv: list[str]) -> None:
    """Show what a model attends to: a page, pictures, word alignments."""
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
    check_model(parser, [settings.model] if settings.model else None)
    output = _check(parser, settings, texts)
    texts_to_align = _read_files(settings) if settings.alignments else None
    # Only torch shows its attention.
    translator = load_translator(settings, engine="torch")
    # It reports font weights that are not installed.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    if texts_to_align:
        _align(translator, settings, texts_to_align)
    elif settings.positions is not None:
        _draw_positions(translator, settings.positions, output)
    else:
        _show(translator, settings, texts, output)


def _check(parser: Parser, settings: AttentionSettings, texts: list[str]) -> Path:
    """Checks what can be checked without a model; returns the file to write."""
    models = [settings.model] if settings.model else []
    if settings.alignments or settings.positions is not None:
        defaults = AttentionSettings()
        for name in ("kind", "layer", "head"):
            if getattr(settings, name) != getattr(defaults, name):
                parser.error(f"--{name} is for the attention of a text: leave it out")
    if settings.alignments:
        if texts or settings.positions is not None:
            parser.error("--alignments excludes texts and --positions: leave them out")
        if len(settings.alignments) > 2:
            parser.error(f"--alignments needs one or two files, got {len(settings.alignments)}")
        if len(settings.alignments) == 1 and (settings.units or settings.gold):
            parser.error("--units and --gold need the target file of --alignments too")
        if settings.output:
            read = [*settings.alignments, *(settings.units or []), settings.gold]
            check_output(Path(settings.output), inputs=read, models=models)
        return Path()
    if settings.units or settings.gold:
        parser.error("--units and --gold need --alignments")
    suffixes: tuple[str, ...] = _PICTURES
    if settings.positions is not None:
        output = Path(settings.output or "positions.svg")
        if texts:
            parser.error("--positions excludes texts: leave them out")
    else:
        output = Path(settings.output or "attention.html")
        suffixes = (".html", *_PICTURES)
        if not 1 <= len(texts) <= 2:
            parser.error(f"expected a source text and at most its translation, got {len(texts)}")
    if output.suffix not in suffixes:
        parser.error(f"--output must end in {', '.join(suffixes)}, got {output.name!r}")
    check_output(output, models=models)
    return output


def _show(
    translator: "Translator", settings: AttentionSettings, texts: list[str], output: Path
) -> None:
    from vanilla_transformer_tools.inspection.attention_maps import read_attention

    maps = read_attention(translator, *texts)
    if output.suffix == ".html":
        from vanilla_transformer_tools.files import write_lines
        from vanilla_transformer_tools.inspection.attention_maps import attention_page

        view = {"layer": settings.layer, "head": settings.head}
        write_lines(output, [attention_page(maps, kind=settings.kind, **view)])
    else:
        from vanilla_transformer_tools.inspection.attention_figures import plot_attention

        plot_attention(
            getattr(maps, settings.kind), output, layer=settings.layer, head=settings.head
        )
    print(f"{output}: {maps.source} -> {maps.target}")


def _draw_positions(translator: "Translator", positions: int, output: Path) -> None:
    from vanilla_transformer_tools.inspection.attention_figures import plot_positions
    from vanilla_transformer_tools.translation.engines import TorchEngine

    model = cast("TorchEngine", translator.engine).model
    print(plot_positions(model, output, positions))


def _read_files(settings: AttentionSettings) -> _TextsToAlign:
    """Reads the files of --alignments, --units and --gold, which must have as many lines."""
    from vanilla_transformer_tools.files import read_lines
    from vanilla_transformer_tools.inspection.alignments import read_gold

    sides = [list(read_lines(file)) for file in settings.alignments or []]
    units = [list(read_lines(file)) for file in settings.units or []]
    gold = read_gold(settings.gold) if settings.gold else []
    counts = [*map(len, sides), *map(len, units), *([len(gold)] if gold else [])]
    if len(set(counts)) > 1:
        files = filter(None, (*(settings.alignments or []), *(settings.units or []), settings.gold))
        read = ", ".join(
            f"{count:,} in {file!r}" for count, file in zip(counts, files, strict=True)
        )
        raise ValueError(
            "The files of --alignments, --units and --gold must have the same number of lines, "
            f"got {read}. Check that they belong together."
        )
    return sides, units, gold


def _align(translator: "Translator", settings: AttentionSettings, texts: _TextsToAlign) -> None:
    from vanilla_transformer_tools.files import write_lines
    from vanilla_transformer_tools.inspection.alignments import align_words, score_alignments

    (sources, *others), units, gold = texts
    targets = others[0] if others else [each.text for each in translator.translate(sources)]
    alignments = list(
        align_words(translator, sources, targets, (units[0], units[1]) if units else None)
    )
    if settings.output:
        write_lines(Path(settings.output), map(str, alignments))
    elif not settings.gold:
        for alignment in alignments:
            print(alignment)
    if settings.gold:
        score = score_alignments(alignments, gold)
        print(f"{score} ({len(gold):,} pairs)")
