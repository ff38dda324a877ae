#!/usr/bin/env python3
"""Rewrites the tokenizers of an export so that transformers.js gives the ids of Python, or fails.

transformers.js takes text that spells a special token for the token, and has no
`split_special_tokens`. So special tokens leave the list that it searches text for: they remain in
the vocabulary, where the pipeline keeps text from becoming one. Python still gets the same ids.

Example:
  python examples/web/fit_tokenizer.py runs/de-en-onnx
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of each part of a pipeline: the name of several steps, and the steps that transformers.js computes
# as the library does; others are left out there or approximate.
STEPS = {
    "normalizer": ("normalizers", {"Replace", "NFC", "NFD", "NFKC", "NFKD", "Lowercase"}),
    "pre_tokenizer": ("pretokenizers", {"Metaspace", "Split"}),
    "post_processor": ("processors", {"TemplateProcessing"}),
    "decoder": ("decoders", {"ByteFallback", "Fuse", "Strip"}),
}
MODELS = ("BPE", "WordLevel")


def steps(pipeline: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The steps of a part of a pipeline."""
    step = pipeline.get(part)
    return step.get(STEPS[part][0], [step]) if step else []


def faults(pipeline: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    """Why transformers.js would give other ids."""
    if (kind := pipeline["model"]["type"]) not in MODELS:
        yield (
            f"The model must be one of {', '.join(MODELS)}, got {kind}, which has no byte fallback "
            "there. Train with --tokenizer_kind bpe, word or char."
        )
    for part, (_, known) in STEPS.items():
        if others := sorted({step["type"] for step in steps(pipeline, part)} - known):
            yield f"The {part} must consist of {', '.join(sorted(known))}, got {', '.join(others)}."
    if not config.get("split_special_tokens"):
        yield "It must be one that vanilla-transformer trained, with `split_special_tokens`."
    if added := [one["content"] for one in pipeline["added_tokens"] if not one["special"]]:
        yield (
            f"It must have no added tokens that are not special, got {', '.join(added[:3])}: text "
            "after them would begin with a blank."
        )


def fit(folder: Path) -> None:
    """Rewrites the tokenizers of a folder.

    Raises:
        ValueError: If transformers.js gives other ids; the files then stay as they are.
    """
    rewritten = {}
    for file in sorted(folder.rglob("tokenizer.json")):
        config_file = file.with_name("tokenizer_config.json")
        pipeline, config = (json.loads(one.read_text("utf-8")) for one in (file, config_file))
        if found := list(faults(pipeline, config)):
            reasons = "\n".join(
                ["transformers.js would give other ids than this tokenizer:", *found]
            )
            raise ValueError(reasons)
        for step in steps(pipeline, "pre_tokenizer"):
            # There, splitting at a string would keep the string.
            if "String" in step.get("pattern", {}):
                step["pattern"] = {"Regex": re.escape(step["pattern"]["String"])}
        special = {token["content"]: token["id"] for token in pipeline["added_tokens"]}
        pipeline["model"]["vocab"] |= special
        pipeline["added_tokens"] = []
        # What decoding leaves out.
        config["additional_special_tokens"] = list(special)
        rewritten |= {file: pipeline, config_file: config}
    if not rewritten:
        raise ValueError("transformers.js needs a fast tokenizer, got none: tokenizer.json.")
    for file, content in rewritten.items():
        file.write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    usage, _, example = __doc__.partition("\nExample:")
    parser = argparse.ArgumentParser(
        description=usage,
        epilog=f"example:{example}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="export to rewrite")
    try:
        fit(parser.parse_args().folder)
    except ValueError as error:
        sys.exit(str(error))
