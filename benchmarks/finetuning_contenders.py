"""Classes of Transformers, and what this package imports from them, as they are fine-tuned."""

from typing import Any

import numpy as np
import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)

from neighbours import Training, random_batches
from vanilla_transformer_tools.interop.importing import convert

# Tokens of a side, the last one included.
SHORTEST, LONGEST = 8, 48


def stacks(layers: int, heads: int, ffn_dim: int) -> dict[str, int | float]:
    """Sizes of both stacks, of which every layer is run."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": ffn_dim, "layerdrop": 0.0}
    return {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()
    }


SIZES: dict[str, dict[str, Any]] = {
    # OPUS-MT's own activation and ids; the tables have 58,101 entries.
    "opus": {"vocab_size": 58_101, "d_model": 512, "scale_embedding": True}
    | {"activation_function": "swish", "max_position_embeddings": 512}
    | {"pad_token_id": 58_100, "decoder_start_token_id": 58_100, "eos_token_id": 0}
    | stacks(6, 8, 2048),
    "nllb": {"vocab_size": 256_206, "d_model": 1024} | stacks(2, 16, 4096),
    # The same with the entries that trimming keeps for Tatoeba (docs/import_export.md).
    "nllb-kept": {"vocab_size": 31_726, "d_model": 1024} | stacks(2, 16, 4096),
    "minute": {"vocab_size": 500, "d_model": 32} | stacks(2, 2, 64),
}


def build(size: str, kind: str) -> PreTrainedModel:
    """A model with random weights, the same for both kinds.

    Args:
        size: Key of `SIZES`.
        kind: "in-tree", the class itself, or "vanilla", what it becomes here.
    """
    classes = (M2M100Config, M2M100ForConditionalGeneration)
    config_class, model_class = (MarianConfig, MarianMTModel) if size == "opus" else classes
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES[size]))
    if kind == "vanilla":
        model = convert(model)
        if model.lm_head.bias is not None:
            # Marian's bias is a constant; ours is trained unless it is frozen.
            model.lm_head.bias.requires_grad = False
    return model


def contender(size: str, kind: str, pairs: int, batches: int) -> Training:
    """A model that trains on random pairs, whose sides have 8 to 48 tokens."""
    model = build(size, kind)
    drawn = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, (batches * pairs, 2))
    indices = np.arange(batches * pairs).reshape(batches, pairs)
    ids = {"pad": model.config.pad_token_id, "end": model.config.eos_token_id}
    return Training(model, random_batches(drawn, indices, model.config.vocab_size, **ids))
