#!/usr/bin/env python
"""A checkpoint of fairseq's `transformer`, with its dictionaries, as a model of this package.

fairseq's options become the constants of a mapping. Text must be segmented as it was for fairseq.
python examples/import_fairseq.py checkpoints/checkpoint_best.pt runs/from-fairseq
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vanilla_transformer_tools.interop.fast_tokenizers import ending_in_eos
from vanilla_transformer_tools.interop.importing import import_model
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# fairseq's options, by the fields of our config.
OPTIONS = {
    "d_model": "encoder_embed_dim",
    "encoder_ffn_dim": "encoder_ffn_embed_dim",
    "decoder_ffn_dim": "decoder_ffn_embed_dim",
    "activation_function": "activation_fn",
    "pre_norm": "encoder_normalize_before",
    "embedding_layer_norm": "layernorm_embedding",
    "share_encoder_decoder_embeddings": "share_all_embeddings",
    "tie_word_embeddings": "share_decoder_input_output_embed",
    "max_position_embeddings": "max_source_positions",
}
# These have the same names.
SAME = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
SAME += ("dropout", "attention_dropout", "activation_dropout")
DEFAULTS = {name: False for name in OPTIONS if name.startswith(("pre_", "share_", "tie_"))}
ACTIVATIONS = {"gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu_squared": "relu2"}
# What has no counterpart here, and no tensors by which that would be noticed.
OFF = ("cross_self_attention", "no_token_positional_embeddings")


def constants(options: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """Fields of our config, from fairseq's options and the sizes of the vocabularies."""
    if faults := [name for name in OFF if options.get(name)]:
        raise SystemExit(f"The model must have these options off: {', '.join(faults)}.")
    named = OPTIONS | dict(zip(SAME, SAME, strict=True))
    found = {ours: options[theirs] for ours, theirs in named.items() if theirs in options}
    found = DEFAULTS | found | {"vocab_size": sizes[0]}
    if activation := ACTIVATIONS.get(found.get("activation_function")):
        found["activation_function"] = activation
    found["scale_embedding"] = not options.get("no_scale_embedding")
    is_shared = found["share_encoder_decoder_embeddings"]
    found |= {"tie_word_embeddings": True} if is_shared else {"decoder_vocab_size": sizes[1]}
    if options.get("encoder_learned_pos"):
        return found | {"position_embedding_type": "learned"}
    half = found.get("d_model", 512) // 2
    found["position_base"] = 10_000.0 ** (half / (half - 1))
    return found | {"position_embedding_type": "sinusoidal_concatenated"}


def read_dictionary(file: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with the ids of a dictionary, whose lines are `token count`."""
    words = [line.rpartition(" ")[0] for line in file.read_text("utf-8").split("\n") if line]
    ids = {word: row for row, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words])}
    if len(ids) < len(words) + 4:
        raise SystemExit(f"{file} must have each token once.")
    backend = Tokenizer(models.WordLevel(ids, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ending_in_eos(backend, bos_token="<s>")


def main(checkpoint: Path, output: Path) -> None:
    """Imports a checkpoint."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    options = content.get("args") or content["cfg"]["model"]
    options = options if isinstance(options, dict) else vars(options)
    names = (f"dict.{options[f'{side}_lang']}.txt" for side in ("source", "target"))
    source, target = (read_dictionary(checkpoint.with_name(name)) for name in names)
    mapping = {"extends": "fairseq", "constants": constants(options, [len(source), len(target)])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_joint = mapping["constants"]["share_encoder_decoder_embeddings"]
        pair = TokenizerPair.joint(source) if is_joint else TokenizerPair(source, target)
        pair.save_pretrained(folder)
        (folder / "map.yaml").write_text(yaml.safe_dump(mapping), "utf-8")
        import_model(str(checkpoint), output, mapping=folder / "map.yaml", tokenizer=name)
    print(f"{output}: every tensor is used; check a few translations")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    main(**vars(parser.parse_args()))
