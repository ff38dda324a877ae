"""Our models as models of CTranslate2; anything that its specification lacks is an error."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.exports.expressed import SIZES, SWITCHES, unexpressed
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, tokens_by_id
from vanilla_transformer_tools.translation.generation_settings import (
    never_generated,
    start_and_ends,
)

try:
    from ctranslate2.converters.transformers import ModelLoader
    from ctranslate2.specs.common_spec import Activation
    from ctranslate2.specs.transformer_spec import (
        TransformerDecoderSpec,
        TransformerEncoderSpec,
        TransformerSpec,
    )
except ImportError as error:
    raise ImportError(
        "Converting to CTranslate2 needs the package `ctranslate2`. "
        "Install it: pip install -e '.[export]'"
    ) from error

# Our names, which are those of Transformers, for the activations that CTranslate2 computes.
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELUTanh,
    "gelu_new": Activation.GELUTanh,
    "gelu_python": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELUTanh,
    "quick_gelu": Activation.GELUSigmoid,
    "relu": Activation.RELU,
    "sigmoid": Activation.Sigmoid,
    "silu": Activation.SWISH,
    "swish": Activation.SWISH,
    "tanh": Activation.Tanh,
}

# Values of fields for which its specification has a place.
_CHOICES = {
    "activation_function": _ACTIVATIONS,
    "norm_type": ("layer_norm", "rms_norm"),
    "position_embedding_type": ("sinusoidal", "sinusoidal_concatenated", "learned", "rotary"),
}

# Stands for minus infinity and fits into float16: its exponential is 0 in every dtype.
_NEVER = -1e4


def position_table_length(config: VanillaTransformerConfig) -> int:
    """Rows of the position table, which CTranslate2 stores and our sinusoids do not need.

    Twice the longest expected sequence leaves room for outputs longer than their sources.
    """
    return int(min(config.last_position, max(2048, 2 * config.max_position_embeddings)))


def refuse_unexpressed(model: PreTrainedModel) -> None:
    """Rejects a model that CTranslate2's specification cannot hold; names all reasons."""
    faults = unexpressed(model.config, SIZES | SWITCHES, _CHOICES)
    _, ends = start_and_ends(model)
    if ends == [None] or len(ends) > 1:
        faults.append(f"`eos_token_id` must be one id, got {ends}.")
    if faults:
        raise ValueError(
            "CTranslate2 cannot hold this model; use the engine `torch` or the ONNX export:\n"
            + "\n".join(faults)
        )


class VanillaTransformerLoader(ModelLoader):
    """Fills CTranslate2's specification of a Transformer from one of our models.

    `<pad>` and `<s>`, or whatever `bad_words_ids` of the generation config name, get a bias in the
    output projection by which no search of CTranslate2 ever generates them. Its log-probabilities
    are therefore normalised over the remaining tokens, while Transformers' beam search normalises
    over all and then forbids some.
    """

    def get_model_spec(self, model: PreTrainedModel) -> TransformerSpec:
        """The weights in CTranslate2's layout; `refuse_unexpressed` says whether they fit."""
        config = model.config
        spec = _empty_spec(config)
        self._set_stack(spec.encoder, model.model.encoder)
        self._set_stack(spec.decoder, model.model.decoder)
        self.set_linear(spec.decoder.projection, model.lm_head)
        bias = torch.zeros(config.target_vocab_size)
        if config.lm_head_bias:
            bias += model.lm_head.bias
        bias[never_generated(model.generation_config)] = _NEVER
        spec.decoder.projection.bias = bias
        return spec

    def set_config(
        self, config: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """What CTranslate2's `config.json` says; sources come with the `</s>` of the tokenizer."""
        start, (end,) = start_and_ends(model)
        config.bos_token = tokenizer.convert_ids_to_tokens(start)
        config.eos_token = tokenizer.convert_ids_to_tokens(end)
        config.unk_token = tokenizer.unk_token
        config.decoder_start_token = config.bos_token
        config.add_source_bos = config.add_source_eos = False
        config.layer_norm_epsilon = model.config.layer_norm_eps
        # For our engine: beyond the table CTranslate2 ends with an error.
        longest = model.config.max_position_embeddings
        config.add_attribute("max_position_embeddings", longest)
        config.add_attribute("position_table_length", position_table_length(model.config))
        # By these `TokenizerPair` knows whether the target has a tokenizer of its own.
        for name in ("share_encoder_decoder_embeddings", "decoder_vocab_size"):
            config.add_attribute(name, getattr(model.config, name))

    def _set_stack(self, spec: Any, stack: Any) -> None:
        """Encoder or decoder: embedding, positions, layers and final norm."""
        is_encoder = isinstance(spec, TransformerEncoderSpec)
        embeddings = spec.embeddings[0] if is_encoder else spec.embeddings
        self.set_embeddings(embeddings, stack.embed_tokens)
        spec.scale_embeddings = stack.embed_scale
        if not stack.has_positions_in_attention:
            positions = torch.arange(position_table_length(stack.config))[None]
            spec.position_encodings.encodings = stack.embed_positions(positions, torch.float32)[0]
        for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
            # CTranslate2 orders fused rows as we do: query, key, value; each head contiguous.
            attention = layer_spec.self_attention
            self.set_layer_norm(attention.layer_norm, layer.self_attn_layer_norm)
            self.set_linear(attention.linear[0], layer.self_attn.qkv_proj)
            self.set_linear(attention.linear[1], layer.self_attn.out_proj)
            if not is_encoder:
                attention = layer_spec.attention
                self.set_layer_norm(attention.layer_norm, layer.encoder_attn_layer_norm)
                self.set_linear(attention.linear[0], layer.encoder_attn.q_proj)
                self.set_linear(attention.linear[1], layer.encoder_attn.kv_proj)
                self.set_linear(attention.linear[2], layer.encoder_attn.out_proj)
            self.set_layer_norm(layer_spec.ffn.layer_norm, layer.final_layer_norm)
            self.set_linear(layer_spec.ffn.linear_0, layer.fc1)
            self.set_linear(layer_spec.ffn.linear_1, layer.fc2)
        if hasattr(spec, "layer_norm"):
            self.set_layer_norm(spec.layer_norm, stack.layer_norm)
        if hasattr(spec, "layernorm_embedding"):
            self.set_layer_norm(spec.layernorm_embedding, stack.embed_layer_norm)

    def set_layer_norm(self, spec: Any, module: Any) -> None:
        """Weight of a norm, and its bias if it has one."""
        spec.gamma = module.weight
        if hasattr(spec, "beta"):
            spec.beta = module.bias


def _empty_spec(config: VanillaTransformerConfig) -> TransformerSpec:
    switches = {
        "activation": _ACTIVATIONS[config.activation_function],
        "pre_norm": config.pre_norm,
        "no_final_norm": config.add_final_layer_norm is False,
        "layernorm_embedding": config.embedding_layer_norm,
        "rms_norm": config.norm_type == "rms_norm",
    }
    stacks = (
        (TransformerEncoderSpec, config.encoder_layers, config.encoder_attention_heads),
        (TransformerDecoderSpec, config.decoder_layers, config.decoder_attention_heads),
    )
    specs = []
    for kind, layers, heads in stacks:
        if config.position_embedding_type == "rotary":
            switches["rotary_dim"] = config.head_shapes(heads)[0].size
            switches["rotary_base"] = config.position_base
        specs.append(kind(layers, heads, **switches))
    return TransformerSpec(*specs)


def convert(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    quantization: str = "float32",
) -> None:
    """Writes model.bin, config.json and the vocabularies of a model that is not refused.

    Args:
        model: The model.
        tokenizer: Tokenizer of the source.
        folder: Folder to write to, made if it is not there.
        quantization: Type of the weights, one of CTranslate2's.
    """
    if quantization != "float32":
        # CTranslate2 rounds the weights in place.
        model = deepcopy(model)
    loader = VanillaTransformerLoader()
    with torch.no_grad():
        spec = loader.get_model_spec(model)
    loader.set_config(spec.config, model, tokenizer)
    pair = TokenizerPair.of_model(model, tokenizer)
    source, target = tokens_by_id(pair.source, "source"), tokens_by_id(pair.target, "target")
    # CTranslate2 writes one file where both sides have the same tokens.
    spec.register_source_vocabulary(_tokens(source, model.config.vocab_size))
    spec.register_target_vocabulary(_tokens(target, model.config.target_vocab_size))
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(exist_ok=True)
    spec.save(str(folder))


def _tokens(tokens: dict[int, str], size: int) -> list[str]:
    """The token of each row of a table; a vocabulary that was padded has rows without one."""
    return [tokens.get(token_id, f"<unused {token_id}>") for token_id in range(size)]
