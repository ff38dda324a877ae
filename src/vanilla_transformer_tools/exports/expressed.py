"""Fields of a config that a format can express; any other one at a value of its own is refused."""

from collections.abc import Collection, Mapping
from dataclasses import fields

from transformers import PreTrainedConfig

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig

# Fields on which no output depends.
WITHOUT_EFFECT = {"depth_scaled_init", "fast", "init_std", "label_smoothing", "use_cache"}
# Sizes, dropout, which an export leaves out, and special tokens.
SIZES = {
    *("vocab_size", "decoder_vocab_size", "d_model", "max_position_embeddings"),
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
    *("dropout", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
}
# Switches of norms, positions, biases and tables.
SWITCHES = {
    *("activation_function", "attention_bias", "lm_head_bias", "scale_embedding"),
    *("pre_norm", "add_final_layer_norm", "embedding_layer_norm", "norm_type", "layer_norm_eps"),
    *("position_embedding_type", "position_base", "position_offset"),
    *("tie_word_embeddings", "share_encoder_decoder_embeddings"),
}
HEADS = {"d_k", "d_v", "key_heads", "value_heads", "talking_heads"}


def own_fields(config: VanillaTransformerConfig) -> dict[str, object]:
    """The fields of an architecture with their defaults, apart from those of every config."""
    general = {one.name for one in fields(PreTrainedConfig)} - (SIZES | SWITCHES)
    return {one.name: one.default for one in fields(config) if one.name not in general}


def unexpressed(
    config: VanillaTransformerConfig,
    expressed: Collection[str],
    choices: Mapping[str, Collection[str | None]],
) -> list[str]:
    """Faults: fields that have another value than their default, and no place in a format.

    Choices are the values of a field that the format has a place for, if they are not all.
    """
    faults = [
        f"`{name}` must be {default!r}, got {getattr(config, name)!r}."
        for name, default in own_fields(config).items()
        if name not in {*expressed, *WITHOUT_EFFECT} and getattr(config, name) != default
    ]
    return faults + [
        f"`{name}` must be one of {', '.join(map(str, values))}, got {getattr(config, name)!r}."
        for name, values in choices.items()
        if getattr(config, name) not in values
    ]
