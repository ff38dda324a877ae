#!/usr/bin/env python
"""A model that came from Marian's own files, and was trained on here, as such files again.

OUT gets model.npz, vocabularies and decoder.yml. They are read back, and kept if the logits are the
model's. Marian begins with zeros instead of a token, so models with another start do not fit; nor
do pre-norm ones, whose norm before keys and values Marian 1.12 leaves out while it translates. The
vocabularies are tokens: give Marian text that is split into them.
python examples/export_marian.py runs/marian-de-en-tuned marian-tuned
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vanilla_transformer_tools.files import new_folder, write_lines
from vanilla_transformer_tools.interop.declarations import Declaration
from vanilla_transformer_tools.interop.importing import LogitGap, compare_logits, load_source
from vanilla_transformer_tools.interop.weight_maps import take_apart, untied_tensors
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, tokens_by_id

# The norms of embeddings have names like those of pre-norm models.
NORMS = [
    f"{side}_emb_ln_{part}_pre" for side in ("encoder", "decoder") for part in ("scale", "bias")
]
# Tensors with a row for each entry of a vocabulary, or a column.
TABLES = ("Wemb", "ff_logit_out_Wt", "ff_logit_out_b")


def vocabulary(tokenizer: Any, side: str, pad: int) -> list[str]:
    """The tokens of one side in the order of their ids, without `<pad>`, which Marian lacks."""
    tokens = tokens_by_id(tokenizer, side)
    rows = [row for row, token in tokens.items() if row != pad and token != f"<unused {row}>"]
    return [tokens.get(row, f"<unused {row}>").rstrip() for row in range(1 + max(rows))]


def marian_options(options: dict[str, Any], sizes: list[int], has_bias: bool) -> dict[str, Any]:
    """Marian's settings, from the fields of its declaration."""
    is_one, is_tied = options["one_table"], options["tied_output"]
    named = {name: value for name, value in options.items() if "-" in name}
    return named | {
        "type": "transformer",
        "dim-vocabs": sizes,
        "layer-operations": None,
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": f"{options['transformer-postprocess-emb'] or ''}d",
        "transformer-postprocess-top": options["transformer-postprocess-top"] or "",
        "tied-embeddings": is_tied and not is_one,
        "tied-embeddings-all": is_tied and is_one,
        "tied-embeddings-src": is_one and not is_tied,
        "output-omit-bias": not has_bias,
    }


def export(name: str, output: Path) -> LogitGap:
    """Writes a model as Marian's files; returns how far those are from the model."""
    model, pair = load_model(name).float().eval(), TokenizerPair.from_pretrained(name)
    config, search, pad = model.config, model.generation_config, model.config.pad_token_id
    is_marians = config.decoder_start_token_id == pad == config.vocab_size - 1
    if config.pre_norm or config.activation_function == "quick_gelu" or not is_marians:
        raise SystemExit(f"{name!r} must be a post-norm model as Marian saves one after 1.12.0.")
    entries = [vocabulary(pair.source, "source", pad), vocabulary(pair.target, "target", pad)]
    declaration, weights = Declaration.of("marian_npz"), untied_tensors(model)
    pieces = {place: declaration.weights.pieces_of(place, NORMS)[0] for place in weights}
    arrays = {}
    for tensor_name, tensor in take_apart(pieces, weights).items():
        array = tensor.numpy()
        if tensor_name.endswith(TABLES):
            array = array[: len(entries[tensor_name != "encoder_Wemb"])]
        # Vectors are matrices of one row.
        arrays[tensor_name] = np.atleast_2d(array)
    options = declaration.source_fields(config.to_dict())
    text = yaml.safe_dump(marian_options(options, [*map(len, entries)], config.lm_head_bias))
    arrays["special:model.yml"] = np.frombuffer(text.encode() + b"\0", np.int8)
    files = ["vocab.yml"] * 2 if pair.is_joint else ["source.yml", "target.yml"]
    decoder = {"relative-paths": True, "models": ["model.npz"], "vocabs": files}
    decoder |= {"beam-size": search.num_beams or 1, "normalize": search.length_penalty or 0.0}
    with new_folder(output, "export") as folder:
        folder.mkdir()
        np.savez(folder / "model.npz", **arrays)
        for file, tokens in zip(files, entries, strict=True):
            quoted = (json.dumps(token, ensure_ascii=False) for token in tokens)
            write_lines(folder / file, (f"{token}: {row}" for row, token in enumerate(quoted)))
        write_lines(folder / "decoder.yml", yaml.safe_dump(decoder).splitlines())
        gap = compare_logits(model, load_source(str(folder)).convert().eval())
        gap.check()
    return gap


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", metavar="model", help="Folder or Hub name of a model.")
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    print(f"{given.output}: {export(given.name, given.output)}")
