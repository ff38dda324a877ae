"""The `translate` command: text in, text out."""

from vanilla_transformer_tools.commands.command import (
    build_parser,
    check_model,
    load_translator,
    parse_with_texts,
)
from vanilla_transformer_tools.commands.lines import plan_translation
from vanilla_transformer_tools.settings import TranslateSettings

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
    check_model(parser, settings.model)
    job = plan_translation(settings, texts)
    translator = load_translator(
        settings,
        num_hypotheses=settings.n_best,
        scores=settings.scores or settings.details or settings.n_best > 1,
        details=settings.details,
        markup=settings.markup,
    )
    job.run(translator).show(are_replaced=settings.replace_unknown)
