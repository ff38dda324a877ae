"""Configuration of the vanilla encoder-decoder Transformer of "Attention Is All You Need"."""

import difflib
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

# What `PreTrainedConfig` and the Auto classes accept beside the declared fields.
_INHERITED_KEYWORDS = {
    "_attn_implementation_internal",
    "_commit_hash",
    "_experts_implementation_internal",
    "_from_auto",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "torch_dtype",
    "use_return_dict",
}

_COUNTS = (
    "vocab_size",
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_position_embeddings",
)


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Sizes and switches of the model; the defaults are the paper's base model (its table 3).

    Args:
        vocab_size: Entries V of the table that embeds source and target and projects the output.
        d_model: Width D of the residual stream; even, because sinusoids come in pairs.
        encoder_layers: Layers of the encoder, N in the paper.
        decoder_layers: Layers of the decoder.
        encoder_attention_heads: Heads H of the encoder's self-attention.
        decoder_attention_heads: Heads H of the decoder's self- and cross-attention.
        encoder_ffn_dim: Inner width F of the encoder's feed-forward networks.
        decoder_ffn_dim: Inner width F of the decoder's feed-forward networks.
        activation_function: Activation of the feed-forward networks, a key of `ACT2FN`.
        dropout: Rate on the sum of embedding and position and on each sublayer's output.
        attention_dropout: Rate on the attention weights; the paper has none.
        activation_dropout: Rate on the feed-forward activation; the paper has none.
        layer_norm_eps: Added to the variance inside each layer norm.
        depth_scaled_init: Divides the initial matrices of the layer at depth l, counted from 1, by
            sqrt(l) (Zhang et al. 2019, arXiv 1908.11365); for stacks of 12 layers and more.
        scale_embedding: Multiplies embedding lookups by sqrt(d_model), section 3.4.
        label_smoothing: Mass that training spreads evenly over all V entries, section 5.4; the
            loss of an evaluation is never smoothed.
        max_position_embeddings: Longest sequence, in tokens, that is expected. Sinusoids have no
            end, so this only sets the length at which an unconfigured `generate` stops.
        tie_word_embeddings: One matrix for the embeddings and the output projection, section 3.4;
            False gives the projection a matrix of its own.
        use_cache: Decoding keeps keys and values of earlier steps.
        pad_token_id: Fills batches up; never generated.
        bos_token_id: First decoder input; never generated.
        eos_token_id: Ends every source and target.
        decoder_start_token_id: What decoding starts from.
        is_encoder_decoder: Always True.

    Raises:
        huggingface_hub.errors.StrictDataclassError: If a value has the wrong type, or if sizes,
            rates or ids do not fit together; the message lists every fault.
    """

    model_type = "vanilla_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (Transformers' own attribute)
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }

    vocab_size: int = 37_000
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    depth_scaled_init: bool = False
    scale_embedding: bool = True
    label_smoothing: float | int = 0.0
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Warns about keywords that are no field; keys of newer releases stay loadable."""
        known = (
            self.__dataclass_fields__.keys()
            | self.attribute_map.keys()
            | _INHERITED_KEYWORDS
            | GenerationConfig._get_default_generation_params().keys()
        )
        for name in sorted(kwargs.keys() - known):
            nearest = difflib.get_close_matches(name, self.__dataclass_fields__, n=1)
            hint = f"; did you mean `{nearest[0]}`?" if nearest else "."
            logger.warning(
                f"`{name}` is not a field of {type(self).__name__} and has no effect{hint}"
            )
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Checks the rules that span fields and reports all that are broken at once.

        Raises:
            ValueError: If any rule is broken (`@strict` re-raises it as StrictDataclassError).
        """
        super().validate_architecture()
        faults = self._size_faults() + self._token_faults()
        if not self.is_encoder_decoder:
            faults.append("`is_encoder_decoder` must be True, got False. Leave it out.")
        if self.activation_function not in ACT2FN:
            faults.append(
                f"`activation_function` must be one of {', '.join(sorted(ACT2FN))}, "
                f"got {self.activation_function!r}."
            )
        if faults:
            raise ValueError("\n".join(faults))

    def _size_faults(self) -> list[str]:
        faults = [
            f"`{name}` must be at least 1, got {getattr(self, name)}."
            for name in _COUNTS
            if getattr(self, name) < 1
        ]
        faults += [
            f"`{name}` must be at least 0 and below 1, got {getattr(self, name)}."
            for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
            if not 0 <= getattr(self, name) < 1
        ]
        faults += [
            f"`d_model` must be a multiple of `{name}`, got {self.d_model} and "
            f"{getattr(self, name)}. Change either one."
            for name in ("encoder_attention_heads", "decoder_attention_heads")
            if getattr(self, name) >= 1 and self.d_model % getattr(self, name)
        ]
        if self.d_model % 2:
            faults.append(
                f"`d_model` must be even, for pairs of sine and cosine, got {self.d_model}."
            )
        if self.layer_norm_eps <= 0:
            faults.append(f"`layer_norm_eps` must be above 0, got {self.layer_norm_eps}.")
        return faults

    def _token_faults(self) -> list[str]:
        faults = [
            f"`{name}` must be at least 0 and below `vocab_size`, got {token} and "
            f"{self.vocab_size}."
            for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
            for tokens in [getattr(self, name)]
            for token in (tokens if isinstance(tokens, list) else [tokens])
            if token is not None and not 0 <= token < self.vocab_size
        ]
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        faults += [
            f"`eos_token_id` must differ from `{name}`, which is never generated, got "
            f"{self.eos_token_id} and {getattr(self, name)}. Give the two tokens ids of their own."
            for name in ("pad_token_id", "bos_token_id")
            if getattr(self, name) is not None and getattr(self, name) in ends
        ]
        return faults


VanillaTransformerConfig.register_for_auto_class()

__all__ = ["VanillaTransformerConfig"]
