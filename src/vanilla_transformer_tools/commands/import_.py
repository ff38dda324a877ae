"""The `import` command: a pretrained model of another class as one of ours."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vanilla_transformer_tools.commands.command import build_parser, check_folder, parse
from vanilla_transformer_tools.settings import option

_EXAMPLE = """OUT gets the weights, the tokenizer and the generation settings of the source. Both
models are run on the same random tokens; unless their logits agree, nothing is kept.
Marian's .npz and weights with a --mapping cannot be run here: all their tensors must be used,
and nothing is compared.

examples:
  vanilla-transformer import Helsinki-NLP/opus-mt-de-en runs/opus-de-en --positions marian
  vanilla-transformer import marian/model.npz runs/marian-de-en
  vanilla-transformer import --mapping map.yaml weights.pt runs/ours
  vanilla-transformer import facebook/nllb-200-distilled-600M runs/nllb-de-en \\
      --keep_vocabulary train.de train.en
"""

_POSITIONS = {
    "transformers": "positions as MarianMTModel computes them, not as Marian does (--positions "
    "marian): see docs/marian.md",
    "marian": "positions as Marian computes them, not as MarianMTModel does: see docs/marian.md",
}


# Options of one group in `--help`.
_mapping = partial(option, group="mapping")
_vocabulary = partial(option, group="vocabulary")


@dataclass(frozen=True)
class ImportSettings:
    """Settings of an import of pretrained weights."""

    dry_run: bool = option(
        "Lists which tensors of the source make up which of ours, and everything that does not "
        "fit; with --keep_vocabulary, how many entries would be kept. Writes nothing.",
        False,
    )
    mapping: str | None = _mapping(
        "YAML file that says which tensors of SOURCE make up which of ours, for weights of any "
        "other program; SOURCE is then a file of them (.safetensors, .pt), or its folder."
    )
    tokenizer: str | None = _mapping(
        "Folder or Hub name of the tokenizer that OUT gets; with --mapping only."
    )
    keep_vocabulary: list[str] | None = _vocabulary(
        "Keeps only the entries of the vocabulary that these text files use, with all characters, "
        "bytes, special tokens and languages. Needs a tokenizer.json (BPE or Unigram).",
        action="extend",
        metavar="FILE",
    )
    min_count: int = _vocabulary(
        "Number of times that an entry must occur in --keep_vocabulary to be kept.", 1
    )
    positions: Literal["transformers", "marian"] = option(
        "For models of MarianMTModel: positions as this class computes them, or as Marian did when "
        "it trained the model, which differ in long sentences. Default: the class's.",
        "transformers",
    )


def import_(argv: list[str]) -> None:
    """Bring in a pretrained model: of Transformers, such as Marian, NLLB or BART, or any other."""
    parser = build_parser(import_, ImportSettings, _EXAMPLE)
    parser.add_argument(
        "source", metavar="SOURCE", help="Folder or Hub name of a model, or a file of weights."
    )
    parser.add_argument("output", metavar="OUT", help="Folder to make.")
    values = parse(parser, argv)
    source, output = values.pop("source"), Path(values.pop("output"))
    if not Path(source).is_file():
        check_folder(source)
    settings = ImportSettings(**values)
    for file in filter(None, [settings.mapping, *(settings.keep_vocabulary or [])]):
        open(file, "rb").close()
    if settings.tokenizer and not settings.mapping:
        parser.error(
            "--tokenizer needs --mapping, because other sources have a tokenizer of their own, got "
            f"{settings.tokenizer!r}. Leave it out."
        )
    if settings.min_count != 1 and not settings.keep_vocabulary:
        parser.error(f"--min_count needs --keep_vocabulary, got only {settings.min_count}")
    _import(source, output, settings)


def _import(source: str, output: Path, settings: ImportSettings) -> None:
    from vanilla_transformer_tools.interop.importing import import_model, load_source
    from vanilla_transformer_tools.interop.trimming import Trimming, kept_ids
    from vanilla_transformer_tools.saved_folder import read_run

    mapping = Path(settings.mapping) if settings.mapping else None
    files = settings.keep_vocabulary
    trimming = Trimming(tuple(files), settings.min_count) if files else None
    tokenizer = settings.tokenizer
    if settings.dry_run:
        loaded = load_source(source, mapping, tokenizer)
        model, plan = loaded.plan()
        for line in plan.lines():
            print(line)
        plan.check()
        _print_assumed(loaded.declaration.assumed())
        if trimming:
            kept = kept_ids(model, loaded.one_tokenizer(), trimming)
            before = model.config.vocab_size
            print(f"vocabulary of {before:,} entries would be cut to {len(kept):,}")
        return
    comparison = import_model(
        source,
        output,
        mapping=mapping,
        tokenizer=tokenizer,
        trimming=trimming,
        positions=settings.positions,
    )
    if comparison:
        print(f"{output}: {comparison} (on random tokens)")
    else:
        print(
            f"{output}: every tensor is used; no logits were compared, as nothing here runs SOURCE"
        )
    run = read_run(str(output))
    origin = run["imported_from"]
    _print_assumed(origin.get("assumed", {}))
    if "positions" in origin:
        print(_POSITIONS[origin["positions"]])
    if "slow_tokenizer" in origin:
        print(f"the tokenizer stays slow, as a fast one would differ: {origin['slow_tokenizer']}")
    if sizes := run.get("trimmed"):
        entries, megabytes = sizes["entries"], sizes["megabytes"]
        print(
            f"vocabulary of {entries[0]:,} entries cut to {entries[1]:,}, weights of "
            f"{megabytes[0]:,.1f} MB to {megabytes[1]:,.1f} MB"
        )


def _print_assumed(fields: dict[str, Any]) -> None:
    """Prints fields to check, which neither the mapping nor any tensor sets."""
    if fields:
        values = ", ".join(f"{name} {value}" for name, value in fields.items())
        print(f"not in the mapping, so as in the paper: {values}")
