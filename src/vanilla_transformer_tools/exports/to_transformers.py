"""One of our models as a model of another class of Transformers.

The declarations in `interop/sources/` are read backwards. Anything else is an error.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.exports.expressed import WITHOUT_EFFECT, own_fields
from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.interop.declarations import Declaration, Source, known_sources
from vanilla_transformer_tools.interop.weight_maps import take_apart, untied_tensors
from vanilla_transformer_tools.saved_folder import read_object

# The `model_type` of each format.
FORMATS = {name.replace("_", ""): name for name in known_sources()}

# The second is the name that releases before 5 do not know.
_GENERAL_TOKENIZERS = ("VanillaTransformerTokenizer", "TokenizersBackend")

# What these classes have and our models do not.
_LAYER_DROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}

# Modules whose rows, not columns, belong to the residual stream.
_WRITERS = ("out_proj", "fc2", "layer_norm")


def to_transformers(
    model: VanillaTransformerForConditionalGeneration, name: str
) -> PreTrainedModel:
    """A model of the class of a format, with the weights and generation settings of one of ours.

    Sinusoids whose sines and cosines alternate become those with all sines first: the columns of
    the residual stream are reordered, with all that reads or writes them. The dtype stays.

    Raises:
        ValueError: If the class cannot express the model; names all reasons.
    """
    refuse_other_models(model, name)
    if faults := _faults(model, name):
        fitting = [one for one in FORMATS if not _faults(model, one)]
        raise ValueError(
            f"The format {name} cannot hold this model:\n"
            + "\n".join(faults)
            + f"\nOther formats of Transformers that can: {', '.join(fitting) or 'none'}."
        )
    target = AutoModelForSeq2SeqLM.from_config(config_of_class(model, name), dtype=model.dtype)
    imported, plan = Source.of(target).plan()
    plan.check()
    weights = untied_tensors(model)
    if imported.config.position_embedding_type != model.config.position_embedding_type:
        weights = {place: _sines_first(place, tensor) for place, tensor in weights.items()}
    shapes = untied_tensors(target)
    parts = {
        # Some classes have biases of the logits in one row.
        place: part.reshape_as(shapes[place])
        for place, part in take_apart(plan.pieces, weights).items()
    }
    # Tables of sinusoids, and biases that the model lacks, stay as the class has made them.
    target.load_state_dict(parts, strict=False, assign=True)
    target.tie_weights()
    target.generation_config = copy.deepcopy(model.generation_config)
    return target.train(model.training)


def _faults(model: VanillaTransformerForConditionalGeneration, name: str) -> list[str]:
    """Fields that would have other values in a model that came back from the class."""
    defaults = own_fields(model.config)
    theirs = Declaration.of(FORMATS[name]).fields(config_of_class(model, name).to_dict())
    ours = {name: getattr(model.config, name) for name in defaults}
    needed = {name: theirs.get(name, default) for name, default in defaults.items()}
    values, expected = _spelled_out(ours), _spelled_out(needed)
    if ours["position_embedding_type"] == "sinusoidal":
        values["position_embedding_type"] = "sinusoidal_concatenated"
    for bias in ("attention_bias", "lm_head_bias"):
        # Zeros in the class do for a bias that the model lacks.
        values[bias] |= expected[bias]
    return [
        f"`{name}` must be {needed[name]!r}, got {ours[name]!r}."
        for name in values
        if values[name] != expected[name] and needed[name] != ours[name]
    ]


def refuse_other_models(model: PreTrainedModel, name: str) -> None:
    """Rejects a model that is none of ours, by the name of the format."""
    if model.config.model_type != VanillaTransformerConfig.model_type:
        raise ValueError(
            f"The format {name} is made of models of this package, got a model of the type "
            f"{model.config.model_type!r}. Bring it in first, by `vanilla-transformer import`."
        )


def name_general_tokenizers(folder: Path) -> None:
    """Lets every release of Transformers load our tokenizer's files by a class of its own."""
    for file in folder.rglob(TOKENIZER_CONFIG_FILE):
        config = read_object(file)
        if config.get("tokenizer_class") in _GENERAL_TOKENIZERS:
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            write_lines(file, [json.dumps(config, indent=2)])


def config_of_class(
    model: VanillaTransformerForConditionalGeneration, name: str
) -> PreTrainedConfig:
    """The config of the class, as far as it can express ours."""
    model_type = FORMATS[name]
    ours = model.config.to_dict() | {"decoder_vocab_size": model.config.target_vocab_size}
    if ours["init_std"] is None:
        # The class has a default of its own.
        del ours["init_std"]
    values = Declaration.of(model_type).source_fields(ours)
    known = {one.name for one in fields(AutoConfig.for_model(model_type))}
    # Some of these classes have settings of generation in their configs, too.
    settings = {
        setting: value
        for setting, value in vars(model.generation_config).items()
        if setting in known and (value is not None or setting == "forced_eos_token_id")
    }
    return AutoConfig.for_model(model_type, **settings | values | _LAYER_DROP)


def _spelled_out(fields_of_ours: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of our config without those on which no output depends, and without defaults."""
    values = {name: one for name, one in fields_of_ours.items() if name not in WITHOUT_EFFECT}
    heads = [values["encoder_attention_heads"], values["decoder_attention_heads"]]
    for size in ("d_k", "d_v"):
        values[size] = [
            values["d_model"] if values[size] is None else values[size] * one for one in heads
        ]
    for count in ("key_heads", "value_heads"):
        values[count] = [values[count] or one for one in heads]
    values["decoder_vocab_size"] = values["decoder_vocab_size"] or values["vocab_size"]
    if values["add_final_layer_norm"] == values["pre_norm"]:
        values["add_final_layer_norm"] = None
    return values


def _sines_first(name: str, tensor: Tensor) -> Tensor:
    """A weight for a residual stream whose even columns come before its odd ones."""
    module = name.rpartition(".")[0]
    axis = 0 if module.endswith(_WRITERS) else 1
    if axis == tensor.dim():
        # A bias of what leaves the stream.
        return tensor
    even, odd = (range(first, tensor.shape[axis], 2) for first in (0, 1))
    return tensor.index_select(axis, torch.tensor([*even, *odd], device=tensor.device))
