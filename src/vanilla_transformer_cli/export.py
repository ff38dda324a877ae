"""The `export` command: a saved model for other runtimes, checked before it is kept."""

import logging
import sys
from pathlib import Path

from vanilla_transformer_cli.command import Parser, build_parser, fail, looks_like_a_path, refuse
from vanilla_transformer_cli.settings import ExportSettings

_EXAMPLE = """The export translates a sample; unless it does so as the model does, nothing is kept.
Greedy translations and the numbers behind them are compared: in float32, whatever the
--quantization, at least 99 % of the lines must be the same and log-probabilities per
token within 0.001 in the mean (ONNX: all logits within 0.0001). Then 16-bit weights
must have log-probabilities within 0.1, integers within 1.

example:
  vanilla-transformer export --format ctranslate2 --quantization int8 runs/de-en runs/de-en-int8
"""


def export(argv: list[str]) -> None:
    """Convert a model for CTranslate2 or ONNX Runtime."""
    parser = build_parser(export, ExportSettings, _EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="Folder or Hub name of a model.")
    parser.add_argument("output", metavar="OUT", help="Folder to make.")
    namespace, unknown = parser.parse_known_args(argv)
    refuse(unknown, parser)
    values = vars(namespace)
    model, output = values.pop("model"), Path(values.pop("output"))
    settings = ExportSettings(**values)
    if settings.format == "onnx" and settings.quantization != "float32":
        parser.error(
            f"--quantization must be float32 with --format onnx, got {settings.quantization}"
        )
    _check(parser, model, output, settings)
    try:
        _export(model, output, settings)
    except ImportError as error:
        # A missing extra; the message names it.
        fail(str(error))


def _check(parser: Parser, model: str, output: Path, settings: ExportSettings) -> None:
    if looks_like_a_path(model) and not Path(model).is_dir():
        parser.error(f"MODEL: there is no folder {model!r}")
    for name, path in (("MODEL", model), ("--sample", settings.sample)):
        if path and Path(path).exists() and Path(path).resolve().is_relative_to(output.resolve()):
            # It would be deleted together with the earlier export that --force replaces.
            parser.error(f"{name} {path!r} must not be at OUT or inside it, got {str(output)!r}")


def _export(model: str, output: Path, settings: ExportSettings) -> None:
    from transformers.utils.logging import disable_progress_bar

    from vanilla_transformer.files import read_lines
    from vanilla_transformer.interop.export import export_to_ctranslate2, export_to_onnx

    disable_progress_bar()
    # torch's exporter tells of torchvision, which we do not need.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    sample = list(read_lines(settings.sample)) if settings.sample else None
    print(f"exporting {model} and comparing translations ...", file=sys.stderr)
    if settings.format == "onnx":
        agreement = export_to_onnx(
            model,
            output,
            sample=sample,
            force=settings.force,
            trust_remote_code=settings.trust_remote_code,
        )
    else:
        agreement = export_to_ctranslate2(
            model,
            output,
            quantization=settings.quantization,
            sample=sample,
            force=settings.force,
            trust_remote_code=settings.trust_remote_code,
        )
    lines = f"the lines of {settings.sample}" if settings.sample else "random tokens"
    print(f"{output}: {agreement} (on {lines})")
