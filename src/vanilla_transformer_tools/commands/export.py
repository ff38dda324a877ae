"""The `export` command: converts a saved model for other software, and checks the result."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from vanilla_transformer_tools.commands.command import (
    build_parser,
    check_folder,
    parse,
    show_messages,
)
from vanilla_transformer_tools.settings import EXPORT_FOLDER, RUNTIMES, TRUST_REMOTE_CODE, option

_EXAMPLE = """An export to a runtime is kept only if it translates a sample greedily as the model
does. In float32, whatever the --quantization, at least 99 % of the lines must be equal, and
log-probabilities per token must differ by at most 0.001 on average (ONNX: 0.0001). With
quantised weights, they may differ by 0.1 for 16-bit types and by 1 for integers. An export
to a class is kept only if the logits of both agree.

Without OUT, an export to CTranslate2 is MODEL/ctranslate2.

examples:
  vanilla-transformer export runs/de-en
  vanilla-transformer export --format ctranslate2 --quantization int8 runs/de-en runs/de-en-int8
  vanilla-transformer export --format pegasus runs/de-en runs/de-en-pegasus
"""

# Options of one group in `--help`.
_runtime = partial(option, group="export to a runtime")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export to another runtime, or to another class."""

    format: Literal[
        "ctranslate2",
        "onnx",
        "bart",
        "blenderbot",
        "fsmt",
        "m2m100",
        "marian",
        "mbart",
        "pegasus",
        "plbart",
    ] = option(
        "CTranslate2, which `translate --engine ctranslate2` uses; ONNX Runtime, with the names "
        "of Optimum and transformers.js; or a class of Transformers, for folders that load "
        "without this package: models with the default switches fit pegasus, with --config "
        "pre_norm=false marian.",
        "ctranslate2",
    )
    quantization: (
        Literal[
            "float32",
            "float16",
            "bfloat16",
            "int8",
            "int8_float32",
            "int8_float16",
            "int8_bfloat16",
            "int16",
        ]
        | None
    ) = _runtime(
        "Type of the weights with --format ctranslate2; int8_X: 8-bit integers, and type X for "
        "all other weights. CTranslate2 replaces a type that the device does not support. "
        "Default: float32."
    )
    sample: str | None = _runtime(
        "File of source lines for comparing the export to a runtime with the model. Default: 100 "
        "random sequences of tokens."
    )
    trust_remote_code: bool = option(TRUST_REMOTE_CODE, False)


def export(argv: list[str]) -> None:
    """Convert a model for CTranslate2, ONNX Runtime or Transformers."""
    parser = build_parser(export, ExportSettings, _EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="Folder or Hub name of a model.")
    text = "Folder to create. Default with --format ctranslate2: MODEL/ctranslate2."
    parser.add_argument("output", metavar="OUT", nargs="?", help=text)
    values = parse(parser, argv)
    model, named = values.pop("model"), values.pop("output")
    settings = ExportSettings(**values)
    if named is None and not (settings.format == "ctranslate2" and Path(model).is_dir()):
        parser.error("OUT is needed, unless a model in a folder is exported to CTranslate2")
    output = Path(model, EXPORT_FOLDER) if named is None else Path(named)
    if settings.format != "ctranslate2" and settings.quantization not in (None, "float32"):
        parser.error(
            f"--quantization must be float32 with --format {settings.format}, got "
            f"{settings.quantization}"
        )
    if settings.format not in RUNTIMES and settings.sample:
        parser.error(f"--sample needs one of --format {', '.join(RUNTIMES)}, got {settings.format}")
    check_folder(model)
    _export(model, output, settings)


def _export(model: str, output: Path, settings: ExportSettings) -> None:
    from vanilla_transformer_tools.exports.export import export_model
    from vanilla_transformer_tools.files import read_lines

    show_messages("exports")
    # torch's exporter warns about missing torchvision, which we do not need.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    agreement = export_model(
        model,
        output,
        format=settings.format,
        quantization=settings.quantization,
        sample=list(read_lines(settings.sample)) if settings.sample else None,
        trust_remote_code=settings.trust_remote_code,
    )
    lines = f"the lines of {settings.sample}" if settings.sample else "random tokens"
    print(f"{output}: {agreement} (on {lines})")
