"""One of our models as torch.nn.Transformer with tables around it, for those who have only torch.

The folder also has a mapping by which `vanilla-transformer import --mapping` takes it back.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from vanilla_transformer.files import write_lines
from vanilla_transformer.interop import nn_transformer
from vanilla_transformer.interop.declarations import MAPPING_FILE, Declaration
from vanilla_transformer.interop.to_transformers import refuse_other_models, take_apart
from vanilla_transformer.interop.weight_maps import shapes_of

_ACTIVATIONS = ("relu", "gelu")
_TABLES = {
    "model.encoder.embed_tokens.weight": "src_embedding.weight",
    "model.decoder.embed_tokens.weight": "tgt_embedding.weight",
    "lm_head.weight": "generator.weight",
}
_SHARED = "model.shared.weight"


def save_nn_transformer(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights, settings, the file that loads them, and the mapping back.

    Args:
        model: One of ours.
        folder: It must not exist yet.

    Raises:
        ValueError: If torch.nn.Transformer cannot express the model; names all reasons.
    """
    refuse_other_models(model, "nn_transformer")
    if faults := _faults(model.config):
        raise ValueError("The format nn_transformer cannot hold this model:\n" + "\n".join(faults))
    folder.mkdir()
    settings = _settings(model)
    write_lines(folder / "config.json", [json.dumps(settings, indent=2)])
    mapping = folder / MAPPING_FILE
    write_lines(mapping, [yaml.safe_dump(_mapping(model.config), sort_keys=False).rstrip()])
    shutil.copy(nn_transformer.__file__, folder)
    target = nn_transformer.Model(settings).to(model.dtype)
    shapes = shapes_of(target.state_dict())
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        # A shared table has other names, too.
        if name != _SHARED and "embed_positions" not in name
    }
    plan = Declaration.of_mapping(mapping).weights.plan(shapes_of(weights), shapes)
    parts = take_apart(plan.pieces, weights, shapes)
    places = torch.arange(settings["longest"])[None]
    for side, stack in (("src", model.model.encoder), ("tgt", model.model.decoder)):
        parts[f"{side}_positions.weight"] = stack.embed_positions(places, model.dtype)[0]
    # Biases of attention that the model lacks stay zero.
    target.load_state_dict(parts, strict=False)
    save_file(target.state_dict(), folder / "model.safetensors")


def _faults(config: Any) -> list[str]:
    """What torch.nn.Transformer has no argument for."""
    faults = [
        f"`{decoder}` must be `{encoder}`, got {getattr(config, decoder)} and "
        f"{getattr(config, encoder)}."
        for encoder, decoder in (
            (f"encoder_{name}", f"decoder_{name}") for name in ("attention_heads", "ffn_dim")
        )
        if getattr(config, decoder) != getattr(config, encoder)
    ]
    head_size = config.d_model // config.encoder_attention_heads
    faults += [
        f"`{name}` must be None, got {getattr(config, name)!r}."
        for name, equivalent in (("d_k", head_size), ("d_v", head_size), ("talking_heads", None))
        if getattr(config, name) not in (None, equivalent)
    ]
    if config.embedding_layer_norm:
        faults.append("`embedding_layer_norm` must be False, got True.")
    if config.activation_function not in _ACTIVATIONS:
        faults.append(
            f"`activation_function` must be one of {', '.join(_ACTIVATIONS)}, "
            f"got {config.activation_function!r}."
        )
    return faults


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    return {
        "transformer": {
            "d_model": config.d_model,
            "nhead": config.encoder_attention_heads,
            "num_encoder_layers": config.encoder_layers,
            "num_decoder_layers": config.decoder_layers,
            "dim_feedforward": config.encoder_ffn_dim,
            "dropout": config.dropout,
            "activation": config.activation_function,
            "layer_norm_eps": config.layer_norm_eps,
            "norm_first": config.pre_norm,
        },
        "final_norm": isinstance(model.model.encoder.layer_norm, nn.LayerNorm),
        "embedding_scale": model.model.encoder.embed_scale,
        "src_vocab_size": config.vocab_size,
        "tgt_vocab_size": config.target_vocab_size,
        "longest": config.max_position_embeddings,
        "generator_bias": config.lm_head_bias,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
    }


def _mapping(config: Any) -> dict[str, Any]:
    """How the tensors become ours again, as `Declaration.of_mapping` reads it."""
    constants = {name: getattr(config, name) for name in type(config).__annotations__}
    # The export has all biases.
    constants["attention_bias"] = True
    tensors, ignored = dict(_TABLES), []
    if config.share_encoder_decoder_embeddings:
        tensors[_SHARED] = "src_embedding.weight"
    if config.lm_head_bias:
        tensors["lm_head.bias"] = "generator.bias"
    if config.position_embedding_type == "learned":
        # Its tables begin with the first position.
        constants["position_offset"] = 0
        tensors["model.encoder.embed_positions.weight"] = "src_positions.weight"
        tensors["model.decoder.embed_positions.weight"] = "tgt_positions.weight"
    else:
        ignored.append("*_positions.weight")
    return {
        "extends": "nn_transformer",
        "prefix": "transformer.",
        "constants": constants,
        "tensors": tensors,
        "ignored": ignored,
    }
