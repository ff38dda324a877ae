#!/usr/bin/env python
r"""Fine-tuning in this package against the class that the weights come from.

Both models have the same random weights and train on the same random pairs, in float32, with the
dropout of the class's config. The speed is relative to the class of Transformers, and so is the
memory of an update beyond weights, gradients and Adam, each measured in a process of its own.

Sizes: opus, MarianMT as OPUS-MT has it; nllb, NLLB-200 600M with 2+2 of its 12+12 layers, which
needs some 14 GB for both models together; nllb-kept, the same with a trimmed vocabulary; minute,
M2M100 with two layers of 32, for a quick look.

Example:
  python benchmarks/finetuning.py --sizes opus nllb
"""

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

from lab import Report, benchmark_parser
from neighbours import Training, compare_training, random_batches
from vanilla_transformer_tools.interop.importing import convert

# The class itself, and what it becomes here.
KINDS = ("in-tree", "vanilla")
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


def main() -> None:
    """Prints a table for each size."""
    parser = benchmark_parser(__doc__, sizes=("opus", "nllb"), known=SIZES, rounds=5)
    parser.add_argument("--pairs", type=int, default=16, help="Pairs of a batch (default: 16).")
    parser.add_argument("--batches", type=int, default=2, help="Updates of a round (default: 2).")
    options = parser.parse_args()
    report = Report(options.output)
    for size in options.sizes:
        settings = {kind: (size, kind, options.pairs, options.batches) for kind in KINDS}
        note = f"{size}, float32, {options.pairs} pairs"
        compare_training(report, note, options.rounds, contender, settings)


def build(size: str, kind: str) -> PreTrainedModel:
    """A model with random weights, the same for both `KINDS`."""
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


if __name__ == "__main__":
    main()
