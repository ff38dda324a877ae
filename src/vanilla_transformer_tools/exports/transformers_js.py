"""Tokenizers in a form to which transformers.js gives the ids of Python."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE, TOKENIZER_CONFIG_FILE

from vanilla_transformer_tools.exports.to_transformers import name_general_tokenizers
from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.saved_folder import read_object

# Of each part of a pipeline: the name of several steps, and the steps that transformers.js computes
# as the library does; others are left out there or approximate.
_STEPS = {
    "normalizer": ("normalizers", {"Replace", "NFC", "NFD", "NFKC", "NFKD", "Lowercase"}),
    "pre_tokenizer": ("pretokenizers", {"Metaspace", "Split"}),
    "post_processor": ("processors", {"TemplateProcessing"}),
    "decoder": ("decoders", {"ByteFallback", "Fuse", "Strip"}),
}
_MODELS = ("BPE", "WordLevel")


def fit_transformers_js(folder: Path) -> None:
    """Rewrites the tokenizers of a folder; Python still gets the same ids from them.

    transformers.js takes text that spells a special token for the token, and has no
    `split_special_tokens`. So special tokens leave the list that it searches text for: they remain
    in the vocabulary, where the pipeline keeps text from becoming one.

    Raises:
        ValueError: If transformers.js gives other ids; the files then stay as they are.
    """
    if not (folder / FULL_TOKENIZER_FILE).is_file():
        raise ValueError(
            f"transformers.js needs a fast tokenizer, got none: {FULL_TOKENIZER_FILE}."
        )
    rewritten: dict[Path, dict[str, Any]] = {}
    for file in sorted(folder.rglob(FULL_TOKENIZER_FILE)):
        pipeline = read_object(file)
        config_file = file.with_name(TOKENIZER_CONFIG_FILE)
        config = read_object(config_file)
        faults = list(_faults(pipeline, config))
        if faults:
            raise ValueError(
                f"transformers.js would give other ids than the tokenizer {file.name}:\n"
                + "\n".join(faults)
            )
        for step in _steps(pipeline, "pre_tokenizer"):
            # There, splitting at a string would keep the string.
            if "String" in step.get("pattern", {}):
                step["pattern"] = {"Regex": re.escape(step["pattern"]["String"])}
        special = {token["content"]: token["id"] for token in pipeline["added_tokens"]}
        pipeline["model"]["vocab"] |= special
        pipeline["added_tokens"] = []
        # What decoding leaves out.
        config["additional_special_tokens"] = list(special)
        rewritten |= {file: pipeline, config_file: config}
    for file, content in rewritten.items():
        write_lines(file, [json.dumps(content, ensure_ascii=False)])
    name_general_tokenizers(folder)


def _steps(pipeline: dict[str, Any], part: str) -> list[dict[str, Any]]:
    step = pipeline.get(part)
    name, _ = _STEPS[part]
    steps: list[dict[str, Any]] = step.get(name, [step]) if step else []
    return steps


def _faults(pipeline: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    model = pipeline["model"]
    if model["type"] not in _MODELS:
        yield (
            f"The model must be one of {', '.join(_MODELS)}, got {model['type']}, which has no "
            "byte fallback there. Train with --tokenizer_kind bpe, word or char."
        )
    for part, (_, known) in _STEPS.items():
        if others := sorted({step["type"] for step in _steps(pipeline, part)} - known):
            yield f"The {part} must consist of {', '.join(sorted(known))}, got {', '.join(others)}."
    if not config.get("split_special_tokens"):
        yield "It must be one that this package trained, with `split_special_tokens`."
    if added := [one["content"] for one in pipeline["added_tokens"] if not one["special"]]:
        yield (
            f"It must have no added tokens that are not special, got {', '.join(added[:3])}: text "
            "after them would begin with a blank."
        )
