"""The `import` command: a pretrained model of Transformers as one of ours."""

from pathlib import Path

from vanilla_transformer_cli.command import build_parser, check_folder, fail, refuse
from vanilla_transformer_cli.settings import ImportSettings

_EXAMPLE = """OUT gets the weights, the tokenizer and the generation settings of the source. Both
models are run on the same random tokens; unless their logits agree, nothing is kept.

example:
  vanilla-transformer import Helsinki-NLP/opus-mt-de-en runs/opus-de-en
"""


def import_(argv: list[str]) -> None:
    """Bring in a pretrained model of Transformers, such as Marian, NLLB or BART."""
    parser = build_parser(import_, ImportSettings, _EXAMPLE)
    parser.add_argument("source", metavar="SOURCE", help="Folder or Hub name of a model.")
    parser.add_argument("output", metavar="OUT", help="Folder to make.")
    namespace, unknown = parser.parse_known_args(argv)
    refuse(unknown, parser)
    check_folder(parser, "SOURCE", namespace.source)
    try:
        _import(namespace.source, Path(namespace.output), namespace.dry_run)
    except ImportError as error:
        # A tokenizer that needs another package; the message names it.
        fail(" ".join(str(error).split()))


def _import(source: str, output: Path, dry_run: bool) -> None:
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer.interop.importing import import_model, plan_import

    disable_progress_bar()
    if dry_run:
        plan = plan_import(source)
        for line in plan.lines():
            print(line)
        plan.check()
    else:
        comparison = import_model(source, output)
        print(f"{output}: {comparison} (on random tokens)")
