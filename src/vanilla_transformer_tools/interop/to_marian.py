"""One of our models as one of Marian's: `marian_files` the other way round.

`sources/marian_npz.yaml` is read backwards. Options that Marian lacks are an error.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.interop.declarations import Declaration
from vanilla_transformer_tools.interop.fast_tokenizers import END, UNKNOWN
from vanilla_transformer_tools.interop.marian_files import (
    DECODER_FILE,
    OUTPUT_BIAS,
    SETTINGS,
    TABLES,
    VECTOR,
    readable,
)
from vanilla_transformer_tools.interop.to_transformers import config_faults, sines_first
from vanilla_transformer_tools.interop.weight_maps import take_apart, untied_tensors
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, tokens_by_id
from vanilla_transformer_tools.translation.engines import Hypothesis

WEIGHTS_FILE = "model.npz"
# Longest output, in lengths of its source; Marian has no other limit.
LENGTH_FACTOR = 3
_DECLARATION = "marian_npz"
# Larger ones are not negligible beside the variance.
_MOST_EPSILON = 1e-5
# Fields that change nothing in a trained model, or have a message of their own.
_NOT_COMPARED = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "max_position_embeddings",
    "bos_token_id",
    "pre_norm",
    "add_final_layer_norm",
)
# Norms of embeddings come before something; by these their names are chosen.
_NORMS_BEFORE = {
    f"{stack}_emb_ln_{part}_pre" for stack in ("encoder", "decoder") for part in ("scale", "bias")
}


def write_marian(
    model: VanillaTransformerForConditionalGeneration, tokenizers: TokenizerPair, folder: Path
) -> None:
    """Writes weights with their settings, vocabularies and decoder.yml.

    Args:
        model: One of ours.
        tokenizers: Of both sides.
        folder: One that exists.

    Raises:
        ValueError: If Marian cannot express the model; names all reasons.
    """
    config = model.config
    sides = {"source": tokenizers.source, "target": tokenizers.target}
    entries = {side: _entries(one, side, config.pad_token_id) for side, one in sides.items()}
    settings = _settings(model, [len(found) for found in entries.values()])
    weights = untied_tensors(model)
    if faults := _faults(model, settings, entries):
        raise ValueError("Marian cannot hold this model:\n" + "\n".join(faults))
    if config.position_embedding_type == "sinusoidal":
        weights = {name: sines_first(name, tensor) for name, tensor in weights.items()}
    rules = Declaration.of(_DECLARATION).weights
    pieces = {name: rules.pieces_of(name, _NORMS_BEFORE)[0] for name in weights}
    rows = dict(zip(("encoder", "decoder"), settings["dim-vocabs"], strict=True))
    arrays: dict[str, Any] = {}
    for name, tensor in take_apart(pieces, weights).items():
        array = tensor.float().numpy()
        if TABLES.fullmatch(name) or name == OUTPUT_BIAS:
            # Without `<pad>`.
            array = array[: rows["encoder" if name == "encoder_Wemb" else "decoder"]]
        arrays[name] = array[None] if VECTOR.fullmatch(name) else array
    text = yaml.safe_dump(settings).encode() + b"\0"
    arrays[SETTINGS] = np.frombuffer(text, np.int8)
    np.savez(folder / WEIGHTS_FILE, **cast(Any, arrays))
    is_joint = entries["source"] == entries["target"]
    names = ["vocab.yml"] * 2 if is_joint else ["source.yml", "target.yml"]
    for file, found in zip(names, entries.values(), strict=True):
        lines = [
            f"{json.dumps(token, ensure_ascii=False)}: {row}" for row, token in enumerate(found)
        ]
        write_lines(folder / file, lines)
    search = model.generation_config
    decoder = {
        "relative-paths": True,
        "models": [WEIGHTS_FILE],
        "vocabs": names,
        "beam-size": search.num_beams or 1,
        "normalize": search.length_penalty if search.length_penalty is not None else 1.0,
        "word-penalty": 0,
        "allow-unk": [tokenizers.target.unk_token_id] not in (search.bad_words_ids or []),
    }
    write_lines(folder / DECODER_FILE, yaml.safe_dump(decoder).splitlines())


def _settings(
    model: VanillaTransformerForConditionalGeneration, sizes: list[int]
) -> dict[str, Any]:
    """Marian's options, as far as they can express a config."""
    config = model.config
    is_one, activation = config.share_encoder_decoder_embeddings, config.activation_function
    return {
        "type": "transformer",
        "dim-emb": config.d_model,
        "dim-vocabs": sizes,
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "transformer-heads": config.encoder_attention_heads,
        "transformer-dim-ffn": config.encoder_ffn_dim,
        "transformer-decoder-dim-ffn": config.decoder_ffn_dim,
        "transformer-ffn-activation": "swish" if activation == "silu" else activation,
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "nd" if config.embedding_layer_norm else "d",
        "transformer-postprocess-top": "n" if config.add_final_layer_norm else "",
        "tied-embeddings": config.tie_word_embeddings and not is_one,
        "tied-embeddings-all": config.tie_word_embeddings and is_one,
        "tied-embeddings-src": is_one and not config.tie_word_embeddings,
        "output-omit-bias": not config.lm_head_bias,
    }


def _entries(tokenizer: PreTrainedTokenizerBase, side: str, pad: int) -> list[str]:
    """The tokens of Marian's vocabulary; `<pad>` and rows that only fill up are none of them."""
    tokens = {
        row: token.rstrip(" ")
        for row, token in tokens_by_id(tokenizer, side).items()
        if row != pad and token != f"<unused {row}>"
    }
    return [tokens.get(row, f"<unused {row}>") for row in range(1 + max(tokens))]


def _faults(
    model: VanillaTransformerForConditionalGeneration,
    settings: dict[str, Any],
    entries: dict[str, list[str]],
) -> list[str]:
    """What Marian has no option for."""
    config = model.config
    declaration = Declaration.of(_DECLARATION)
    # Sizes and ids are compared with the entries instead.
    given: dict[str, Any] = {"rows": config.vocab_size, "target_rows": config.decoder_vocab_size}
    given |= {"pad": config.pad_token_id, "end": config.eos_token_id}
    options = {**settings, **readable(settings, False), **given}
    faults = declaration.faults(options)
    if config.pre_norm:
        faults.append(
            "`pre_norm` must be False, got True: while it decodes, Marian 1.12 leaves out the norm "
            "of keys and values."
        )
    is_small = config.layer_norm_eps <= _MOST_EPSILON
    faults += config_faults(
        config,
        declaration.fields(options),
        zeros=["lm_head_bias"],
        free=[*_NOT_COMPARED, *["layer_norm_eps"] * is_small],
    )
    start = model.model.decoder.embed_tokens.weight[config.decoder_start_token_id]
    if start.abs().max():
        faults.append(
            "The row of `decoder_start_token_id` must be zeros, with which Marian's decoder "
            f"begins, got numbers of up to {start.abs().max().item():.3g}. Fine-tuning of a model "
            "of Marian with --label_smoothing_factor 0 does not change them."
        )
    last = max(config.vocab_size, config.target_vocab_size) - 1
    if not config.pad_token_id == config.decoder_start_token_id == last:
        faults.append(
            f"`pad_token_id` and `decoder_start_token_id` must be {last}, the last row, which "
            f"Marian has not, got {config.pad_token_id} and {config.decoder_start_token_id}."
        )
    faults += [
        f"The vocabulary of the {side} must have {token}."
        for side, found in entries.items()
        for token in (END, UNKNOWN)
        if token not in found
    ]
    return faults


def has_engine() -> bool:
    """Whether Marian is installed, as `pymarian`."""
    return importlib.util.find_spec("pymarian") is not None


def translate(
    folder: Path, tokenizers: TokenizerPair, sources: Sequence[list[int]]
) -> list[Hypothesis]:
    """What Marian translates greedily; scores are log-probabilities per token.

    Args:
        folder: Made by `write_marian`.
        tokenizers: Tokenizers of the model.
        sources: Ids with `</s>`.

    Raises:
        ValueError: If it fails; ends with its last words.
    """
    # Marian takes no blanks inside a token.
    read, written = (
        {row: token.rstrip(" ") for row, token in tokens_by_id(one, side).items()}
        for side, one in (("source", tokenizers.source), ("target", tokenizers.target))
    )
    command = [sys.executable, "-m", "pymarian", "decode", "-c", DECODER_FILE, "--cpu-threads", "1"]
    command += ["-w", "200", "--quiet", "-b", "1", "--n-best", "--normalize", "0"]
    command += ["--mini-batch", "1", "--max-length-factor", str(LENGTH_FACTOR)]
    found = subprocess.run(
        command,
        cwd=folder,
        input="".join(f"{' '.join(read[row] for row in source[:-1])}\n" for source in sources),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    results = re.findall(r"^\d+ \|\|\| (.*?) \|\|\| .*?= *\S+ \|\|\| (\S+)$", found.stdout, re.M)
    if found.returncode or len(results) != len(sources):
        raise ValueError(
            f"Marian must decode the exported model, but it ended with {found.returncode}: "
            f"{found.stderr.strip()[-300:]}"
        )
    ids = {token: row for row, token in written.items()}
    hypotheses = []
    for source, (text, score) in zip(sources, results, strict=True):
        tokens = [ids[token] for token in text.split()]
        is_whole = len(tokens) < LENGTH_FACTOR * len(source)
        end = tokenizers.target.eos_token_id if is_whole else None
        hypotheses.append(Hypothesis(tokens, float(score) / (len(tokens) + is_whole), end))
    return hypotheses
