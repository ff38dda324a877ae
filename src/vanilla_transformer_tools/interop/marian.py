"""Marian's own models: an `.npz` with settings, vocabularies, and decoder.yml.

`sources/marian_npz.yaml` declares the conversion. Marian's decoder begins with an embedding of
zeros instead of a token: a `<pad>` with such a row is added.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from vanilla_transformer_tools.files import parse_yaml, read_lines
from vanilla_transformer_tools.interop.declarations import Declaration, Source
from vanilla_transformer_tools.interop.fast_tokenizers import (
    END,
    PAD,
    UNKNOWN,
    ending_in_eos,
    piece_ids,
    read_pieces,
    sentencepiece_backend,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

_SETTINGS = "special:model.yml"
_DECODER_FILE = "decoder.yml"
# Rows for each entry of a vocabulary, and columns for each entry.
_TABLES = re.compile(r"(encoder_|decoder_)?Wemb|decoder_ff_logit_out_Wt")
_OUTPUT_BIAS = "decoder_ff_logit_out_b"
_OLD_PROJECTION, _PROJECTION = "decoder_ff_logit_out_W", "decoder_ff_logit_out_Wt"
# Saved as matrices of one row.
_VECTOR = re.compile(r".*_(b\w*|ln_(scale|bias)(_pre)?)")
# The last release that approximates GELU by a swish.
_LAST_WITH_SWISH = (1, 12, 0)
# Logit of what Marian has no entry for: its probability is zero in every dtype. A lower one would
# weigh on the loss of label smoothing.
NO_ENTRY = -1e3


def find_npz(source: Path) -> Path | None:
    """Marian's model that a path names: itself, or in a folder that is no model of Transformers.

    Raises:
        ValueError: If a folder has several, and no decoder.yml that names one.
    """
    if source.is_file():
        return source if source.suffix == ".npz" else None
    if not source.is_dir() or (source / "config.json").exists():
        return None
    files = [file for file in sorted(source.glob("*.npz")) if ".optimizer" not in file.suffixes]
    named = _decoder_settings(source / _DECODER_FILE).get("models") or []
    if len(files) > 1 and len(named) == 1:
        files = [file for file in files if file.name == Path(str(named[0])).name]
    if len(files) > 1:
        raise ValueError(
            f"{str(source)!r} must hold one model of Marian, got "
            f"{', '.join(file.name for file in files)}. Name the file itself."
        )
    return next(iter(files), None)


def read_marian(file: Path) -> Source:
    """Reads a model, its vocabularies and its decoder.yml, which are in the folder of the file.

    Fields are Marian's options by name, and what `sources/marian_npz.yaml` needs besides: sizes
    with `<pad>`, and operations without dropout.

    Raises:
        ValueError: If a file is missing or damaged, would run code, or does not fit, or if the
            model is not of the declared kind; names all reasons.
        OSError: If a file cannot be read.
    """
    arrays = _read_arrays(file)
    settings = _model_settings(file, arrays)
    own = file.with_name(f"{file.name}.{_DECODER_FILE}")
    decoder = _decoder_settings(own if own.is_file() else file.with_name(_DECODER_FILE))
    settings |= {name: decoder[name] for name in ("word-penalty",) if name in decoder}
    settings |= _readable(settings, "Wpos" in arrays)
    declaration = Declaration.of("marian_npz")
    if faults := declaration.faults(settings):
        raise ValueError(
            f"{str(file)!r} must be a Transformer that can be expressed, got:\n" + "\n".join(faults)
        )
    sizes = settings.get("dim-vocabs") or []
    pair = _read_tokenizers(file, decoder, sizes)
    pad = max(sizes)
    settings |= {
        "rows": pad + 1,
        "target_rows": None if settings["one_table"] or pair.is_joint else pad + 1,
        "pad": pad,
        "end": pair.target.eos_token_id,
    }
    generation = _generation_config(decoder, pair.target, pad)
    tensors = _with_pad(arrays, sizes, pad + 1)
    return Source({"model_type": "marian_npz"}, declaration, settings, tensors, pair, generation)


def _read_tokenizers(file: Path, decoder: Mapping[str, Any], sizes: list[int]) -> TokenizerPair:
    """Tokenizers of the vocabularies of a model, which must have these sizes."""
    files = list(dict.fromkeys(_vocabulary_files(file, decoder)))
    vocabularies = [_read_vocabulary(one) for one in files]
    counts = [1 + max(entries.values(), default=-1) for entries, _ in (vocabularies * 2)[:2]]
    if counts != list(sizes):
        raise ValueError(
            f"The vocabularies of {str(file)!r} must have {_both(sizes)} entries, as its "
            f"`dim-vocabs` says, got {_both(counts)} in "
            f"{' and '.join(one.name for one in files)}. Use the ones of its training."
        )
    sides = [_vocabulary_tokenizer(entries, max(sizes), pieces) for entries, pieces in vocabularies]
    return TokenizerPair.joint(sides[0]) if len(sides) == 1 else TokenizerPair(*sides)


def _generation_config(
    decoder: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, pad: int
) -> GenerationConfig:
    """The search of decoder.yml."""
    unknown = [] if decoder.get("allow-unk") else [[tokenizer.unk_token_id]]
    return GenerationConfig(
        num_beams=decoder.get("beam-size"),
        length_penalty=decoder.get("normalize"),
        bad_words_ids=[[pad], *unknown],
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), pad),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id),
    )


def _read_arrays(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except MemoryError:
        raise
    # A damaged archive may fail in any step of the reader.
    except Exception as error:
        raise ValueError(
            f"The arrays of {str(file)!r} must be numbers that can be read, got: {error}. Copy the "
            "file again, or save the model by Marian again."
        ) from error


def _model_settings(file: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The settings inside the file, which leave the arrays."""
    content = arrays.pop(_SETTINGS, None)
    try:
        text = b"" if content is None else content.tobytes().rstrip(b"\0")
        settings = parse_yaml(text.decode())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{str(file)!r} must hold the settings of its model as {_SETTINGS!r}, got "
            f"{'none' if content is None else 'no YAML'}. Save the model by Marian again."
        )
    return settings


def _readable(settings: Mapping[str, Any], learned: bool) -> dict[str, Any]:
    """Settings that the declaration needs, made of Marian's options."""

    def steps(option: str) -> str:
        # Dropout (`d`) changes nothing here, wherever it is.
        return str(settings.get(f"transformer-{option}") or "").replace("d", "")

    activation = settings.get("transformer-ffn-activation")
    release = re.match(r"v(\d+)\.(\d+)\.(\d+)", str(settings.get("version")))
    if activation == "gelu" and release and tuple(map(int, release.groups())) <= _LAST_WITH_SWISH:
        activation = "quick_gelu"
    is_one = bool(settings.get("tied-embeddings-all") or settings.get("tied-embeddings-src"))
    is_tied = bool(settings.get("tied-embeddings-all") or settings.get("tied-embeddings"))
    return {
        "layer-operations": f"{steps('preprocess')}, {steps('postprocess')}",
        "transformer-postprocess-top": steps("postprocess-top"),
        "transformer-postprocess-emb": steps("postprocess-emb"),
        "transformer-ffn-activation": activation,
        "transformer-decoder-dim-ffn": settings.get("transformer-decoder-dim-ffn")
        or settings.get("transformer-dim-ffn"),
        "one_table": is_one,
        "tied_output": is_tied,
        "learned-positions": learned,
    }


def _with_pad(
    arrays: Mapping[str, np.ndarray[Any, Any]], sizes: list[int], rows: int
) -> dict[str, Tensor]:
    """The tensors, with a row of zeros for `<pad>`, and for entries that one vocabulary lacks."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    if _OLD_PROJECTION in tensors:
        tensors[_PROJECTION] = tensors.pop(_OLD_PROJECTION).T
    for name, tensor in tensors.items():
        if _VECTOR.fullmatch(name):
            tensors[name] = tensor.reshape(-1)
        elif _TABLES.fullmatch(name) and tensor.dim() == 2:
            missing = tensor.new_zeros(max(0, rows - len(tensor)), tensor.shape[1])
            tensors[name] = torch.cat([tensor, missing])
    bias = tensors.get(_OUTPUT_BIAS, torch.zeros(sizes[-1]))
    tensors[_OUTPUT_BIAS] = torch.cat([bias, bias.new_full((rows - len(bias),), NO_ENTRY)])
    return tensors


def _decoder_settings(file: Path) -> dict[str, Any]:
    """Settings in decoder.yml; empty if there is no such file."""
    content = parse_yaml(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold Marian's options, got {content!r:.60}.")
    return content


def _vocabulary_files(file: Path, decoder: Mapping[str, Any]) -> list[Path]:
    """The vocabularies of source and target."""
    folder = file.parent
    usual = [name for name in ("vocab.spm", "vocab.yml") if (folder / name).is_file()]
    named = [str(name) for name in decoder.get("vocabs") or usual[:1] * 2]
    files = [folder / Path(name).name for name in named]
    missing = [one.name for one in files if not one.is_file()]
    if missing or len(files) != 2:
        raise ValueError(
            f"{file.name!r} must have two vocabularies next to it, which its {_DECODER_FILE} names "
            f"under `vocabs`, or one vocab.spm or vocab.yml for both, got "
            f"{'no ' + ', '.join(missing) if missing else ', '.join(named) or 'none'}. Copy them "
            "there."
        )
    return files


def _vocabulary_tokenizer(
    entries: Mapping[str, int], pad: int, pieces: Any = None
) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the ids of one of Marian's vocabularies, and `<pad>` behind them.

    Pieces split text; without them, text has its tokens between blanks.
    """
    entries = {**entries, PAD: pad}
    if pieces:
        return ending_in_eos(sentencepiece_backend(pieces, entries))
    names = {token_id: token for token, token_id in entries.items()}
    # No text spells a name with a blank.
    rows = {names.get(row, f"<unused {row}>"): row for row in range(pad + 1)}
    backend = Tokenizer(models.WordLevel(rows, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[ \t\r]+"), "removed")
    return ending_in_eos(backend)


def _read_vocabulary(file: Path) -> tuple[dict[str, int], Any]:
    if file.suffix == ".spm":
        pieces = read_pieces(file)
        return piece_ids(pieces), pieces
    try:
        entries = json.loads(file.read_bytes()) if file.suffix == ".json" else _read_yaml(file)
    except ValueError as error:
        raise ValueError(f"{file} must list tokens and their ids, got: {error}") from error
    if faults := [token for token in (END, UNKNOWN) if token not in entries]:
        raise ValueError(f"{file} must have {END} and {UNKNOWN}, got no {', '.join(faults)}.")
    return entries, None


def _read_yaml(file: Path) -> dict[str, int]:
    """Ids by token of `token: id` lines; YAML's own readers take minutes for them."""
    entries = {}
    key = ""
    for number, line in enumerate(read_lines(file), start=1):
        if line.startswith("? "):
            key = line[2:]
            continue
        before, _, value = line.rpartition(":")
        token, key = _unquoted(key or before), ""
        if not token or not value.strip().isdecimal() or token in entries:
            raise ValueError(f"line {number} is no new token with an id: {line!r:.60}")
        entries[token] = int(value)
    return entries


def _unquoted(key: str) -> str:
    if key[:1] == '"' and "\\" in key:
        return str(yaml.safe_load(key))
    if key[:1] == key[-1:] and key[:1] in ("'", '"'):
        return key[1:-1].replace("''", "'") if key[0] == "'" else key[1:-1]
    return key


def _both(counts: Any) -> str:
    return " and ".join(f"{count:,}" for count in counts)
