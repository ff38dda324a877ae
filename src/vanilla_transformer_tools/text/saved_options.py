"""With which options of `train` the tokenizers of a saved model were made."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.tokenization_vanilla_transformer import (
    BLANK_SEPARATED,
    TokenizerKind,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair


def options_of(tokenizers: TokenizerPair) -> dict[str, Any]:
    """Values of the options, by their names; for an imported tokenizer, the nearest ones.

    Args:
        tokenizers: Tokenizers of a saved model; options of both sides come from the source.
    """
    source = tokenizers.source
    return {
        "tokenizer_kind": _kind(source),
        # Text that was taken apart already, as most of the training text was, is no longer.
        "unicode_form": source.init_kwargs.get("unicode_form"),
        "vocab_size": len(source),
        "separate_vocabularies": not tokenizers.is_joint,
        # Symbols may come before it.
        "pretokenized": (_boundary(source) or {}).get("Regex", "").endswith(BLANK_SEPARATED),
    }


def _kind(tokenizer: PreTrainedTokenizerBase) -> TokenizerKind:
    model = _pipeline(tokenizer).get("model", {}).get("type")
    if model == "WordLevel":
        return "word" if _boundary(tokenizer) == {"String": " "} else "char"
    return "unigram" if model == "Unigram" else "bpe"


def _boundary(tokenizer: PreTrainedTokenizerBase) -> dict[str, str] | None:
    """Pattern of the last step that splits text before the model sees it; None: there is none."""
    step = _pipeline(tokenizer).get("pre_tokenizer") or {}
    last = (step.get("pretokenizers") or [step])[-1]
    pattern: dict[str, str] | None = last.get("pattern")
    return pattern


def _pipeline(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Steps of a fast tokenizer; a slow one has none to look at."""
    if not tokenizer.is_fast:
        return {}
    pipeline: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return pipeline
