#!/usr/bin/env python
"""Compares what Marian computes with ours and MarianMTModel; needs `pip install pymarian`.

Marian decodes greedily with random weights, and both models score its outputs. Example:
python scripts/compare_marian.py --lengths 4 21 41 81 101
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from runs import table
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.interop.marian import (
    NO_ENTRY,
    has_engine,
    translate,
    vocabulary_tokenizer,
    write_marian,
)
from vanilla_transformer_tools.interop.to_transformers import to_transformers
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

ENTRIES = 90


@torch.no_grad()
def random_model() -> VanillaTransformerForConditionalGeneration:
    """A post-norm model as Marian has them."""
    ids = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), ENTRIES)
    config = VanillaTransformerConfig(
        **ids | {"eos_token_id": 0, "bos_token_id": 0, "vocab_size": ENTRIES + 1},
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        d_model=64,
        pre_norm=False,
        lm_head_bias=True,
        position_embedding_type="sinusoidal_concatenated",
        position_base=10_000 ** (32 / 31),
    )
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        scale = 0.2 if weight.dim() == 1 else 0.125
        weight.copy_(scale * torch.randn_like(weight) + name.endswith("norm.weight"))
    model.model.shared.weight[ENTRIES], model.lm_head.bias[ENTRIES] = 0, NO_ENTRY
    model.lm_head.bias[0] = -9
    return model


@torch.no_grad()
def log_probability(model: PreTrainedModel, source: list[int], target: list[int]) -> float:
    """Sum over a target without its end."""
    ids, start = torch.tensor([source]), torch.tensor([[ENTRIES, *target[:-1]]])
    logits = model(input_ids=ids, decoder_input_ids=start, use_cache=False).logits[0]
    logits[:, ENTRIES] = -torch.inf
    return logits.log_softmax(-1)[range(len(target)), target].sum().item()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 41, 101], help="In tokens.")
    lengths = parser.parse_args().lengths
    if not has_engine():
        sys.exit("This comparison needs Marian: pip install pymarian")
    ours = random_model()
    words = {"</s>": 0, "<unk>": 1} | {str(row): row for row in range(2, ENTRIES)}
    sources = [[*torch.randint(2, ENTRIES, (length,)).tolist(), 0] for length in lengths]
    pair = TokenizerPair.joint(vocabulary_tokenizer(words, ENTRIES))
    with TemporaryDirectory() as folder:
        write_marian(ours, pair, Path(folder))
        decoded = translate(Path(folder), pair, sources)
    ours.config.position_base = 10_000
    theirs = to_transformers(ours, "marian").eval()
    rows = [["source, output (tokens)", "Marian", "this package", "`MarianMTModel`"]]
    for source, found in zip(sources, decoded, strict=True):
        target = found.ended
        scores = [log_probability(one, source, target) for one in (ours, theirs)]
        scores.insert(0, found.score * len(target))
        rows.append([f"{len(source) - 1}, {len(target)}", *(f"{score:.3f}" for score in scores)])
    print(table(*rows))


if __name__ == "__main__":
    main()
