"""Configuration of the vanilla encoder-decoder Transformer of "Attention Is All You Need"."""

import copy
import difflib
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

if TYPE_CHECKING:
    # Never executed, but read by Transformers: with the config's file it saves every file that this
    # one imports, and tells the code of two folders apart by all of them.
    from .modeling_vanilla_transformer import VanillaTransformerModel  # noqa: F401

logger = logging.get_logger(__name__)

# Keywords that `PreTrainedConfig` and the Auto classes accept besides the declared fields and those
# that begin with an underscore.
_INHERITED_KEYWORDS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
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
    # These may be None.
    "decoder_vocab_size",
    "d_k",
    "d_v",
    "key_heads",
    "value_heads",
)

# Values of fields, by name.
CHOICES = {
    "norm_type": ("layer_norm", "rms_norm"),
    "position_embedding_type": ("sinusoidal", "sinusoidal_concatenated", "learned", "rotary"),
    "talking_heads": (None, "logits", "weights", "both"),
}


class HeadShape(NamedTuple):
    """Number of heads, and the size of each."""

    heads: int
    size: int


@strict
class VanillaTransformerConfig(PreTrainedConfig):
    """Sizes and switches of the model; the defaults are the paper's base model (its table 3).

    Args:
        vocab_size: Entries V of the table that embeds source and target and projects the output;
            of the source's only, if each has its own table.
        decoder_vocab_size: Entries of the target's table; None: as many as `vocab_size`.
        share_encoder_decoder_embeddings: One table for source and target, section 3.4. False gives
            each its own table, for vocabularies that have nothing in common.
        d_model: Width D of the residual stream; even, unless positions are learned.
        encoder_layers: Layers of the encoder, N in the paper.
        decoder_layers: Layers of the decoder.
        encoder_attention_heads: Heads H of the encoder's self-attention.
        decoder_attention_heads: Heads H of the decoder's self- and cross-attention.
        encoder_ffn_dim: Inner width F of the encoder's feed-forward networks.
        decoder_ffn_dim: Inner width F of the decoder's feed-forward networks.
        d_k: Size of a head's queries and keys; None: d_model / heads. Larger ones raise the rank of
            the score matrix (Bhojanapalli et al. 2020, arXiv 2002.07028).
        d_v: Size of a head's values; None: d_model / heads.
        attention_bias: Adds biases to the projections of attention; the paper has none.
        talking_heads: Mixes the heads' score maps by a learned matrix before the softmax
            ("logits"), their attention weights after it ("weights"), or "both" (Shazeer et al.
            2020, arXiv 2003.02436). Runs with eager attention only.
        key_heads: Heads h_k of queries and keys, which "logits" mixes into as many score maps as
            there are attention heads; None: as many as those.
        value_heads: Heads h_v of values, for which "weights" mixes the maps; None: as many as there
            are attention heads.
        activation_function: Activation of the feed-forward networks, a key of `ACT2FN`.
        dropout: Rate on the sum of embedding and position and on each sublayer's output.
        attention_dropout: Rate on the attention weights; the paper has none.
        activation_dropout: Rate on the feed-forward activation; the paper has none.
        pre_norm: The layer norm comes before each sublayer; False: after the residual sum, as in
            the paper (section 3.1); deep stacks then need a longer warm-up.
        add_final_layer_norm: Ends each stack in a layer norm; None: if `pre_norm`. Post-norm
            layers end in one anyway; `torch.nn.Transformer` adds another.
        embedding_layer_norm: Normalises the sum of embedding and position in each stack, as BART
            and mBART do; the paper does not.
        norm_type: "layer_norm", or "rms_norm", which leaves out mean and bias (Zhang and Sennrich
            2019, arXiv 1910.07467), in all places of a norm.
        layer_norm_eps: Added to the variance inside each norm.
        position_embedding_type: "sinusoidal", with alternating sines and cosines (section 3.5),
            "sinusoidal_concatenated", all sines before all cosines, "learned", or "rotary", which
            adds nothing and turns queries and keys of self-attention (Su et al. 2021, arXiv
            2104.09864).
        position_base: Of the sinusoids' wavelengths, 10000 in the paper.
        position_offset: Position of the first token. Concatenated sinusoids with an offset of 2
            and base 10000^(h / (h - 1)), h = d_model / 2, equal M2M100's; with the same base
            and no offset Marian's, with the defaults `MarianMTModel`'s.
        init_std: Standard deviation of all matrices and tables at the start; None: Xavier-uniform
            matrices and tables with D^-1/2.
        depth_scaled_init: Divides the initial matrices of the layer at depth l, counted from 1, by
            sqrt(l) (Zhang et al. 2019, arXiv 1908.11365); for stacks of 12 layers and more.
        scale_embedding: Multiplies embedding lookups by sqrt(d_model), section 3.4.
        label_smoothing: Mass that training spreads evenly over all V entries, section 5.4; the
            loss of an evaluation is never smoothed. Trainer's `label_smoothing_factor` replaces it.
        max_position_embeddings: Longest expected sequence, in tokens. Learned positions
            end there. Sinusoids have no end, so this only sets the length at which an unconfigured
            `generate` stops.
        tie_word_embeddings: The output projection is the target's table, section 3.4; False gives
            it its own matrix.
        lm_head_bias: Adds a bias to the output projection.
        use_cache: Decoding keeps keys and values of earlier steps.
        fast: The installed package computes dropout, attention, loss and search in less time and
            memory; False: plain torch does, and the searches of Transformers.
        pad_token_id: Pads batches; never generated.
        bos_token_id: First decoder input; never generated, unless it ends targets, too.
        eos_token_id: Ends every source and target.
        decoder_start_token_id: First token that the decoder reads.
        is_encoder_decoder: Always True.

    Raises:
        huggingface_hub.errors.StrictDataclassError: If a value has the wrong type, or if sizes,
            rates or ids do not fit together; the message lists every fault.
    """

    model_type = "vanilla_transformer"
    # The cache by both its names; the second is that of Transformers before 5.24.
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  (Transformers')
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
    }

    vocab_size: int = 37_000
    decoder_vocab_size: int | None = None
    share_encoder_decoder_embeddings: bool = True
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    d_k: int | None = None
    d_v: int | None = None
    attention_bias: bool = True
    talking_heads: str | None = None
    key_heads: int | None = None
    value_heads: int | None = None
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    pre_norm: bool = True
    add_final_layer_norm: bool | None = None
    embedding_layer_norm: bool = False
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-5
    position_embedding_type: str = "sinusoidal"
    position_base: float | int = 10_000
    position_offset: int = 0
    init_std: float | None = None
    depth_scaled_init: bool = False
    scale_embedding: bool = True
    label_smoothing: float | int = 0.0
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    use_cache: bool = True
    fast: bool = True
    pad_token_id: int = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Warns about unknown keywords; keys of newer releases stay loadable."""
        known = (
            self.__dataclass_fields__.keys()
            | self.attribute_map.keys()
            | _INHERITED_KEYWORDS
            | vars(GenerationConfig()).keys()
            | {name for name in kwargs if name.startswith("_")}
        )
        for name in sorted(kwargs.keys() - known):
            nearest = difflib.get_close_matches(name, self.__dataclass_fields__, n=1)
            newer = ". If a newer release saved this model, update the package."
            hint = f"; did you mean `{nearest[0]}`?" if nearest else newer
            logger.warning_once(
                f"`{name}` is not a field of {type(self).__name__} and has no effect{hint}"
            )
        super().__post_init__(**kwargs)

    @property
    def target_vocab_size(self) -> int:
        """Size of the target's vocabulary, and so of the output projection."""
        return self.decoder_vocab_size or self.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids of all tokens that end a target."""
        ends = self.eos_token_id
        return ends if isinstance(ends, list) else [ends] if ends is not None else []

    @property
    def last_position(self) -> float:
        """Last position that can be encoded, counted from 1; sinusoids have no end."""
        return self.max_position_embeddings if self.position_embedding_type == "learned" else inf

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> "VanillaTransformerConfig":
        """As in Transformers, where a decoder's config needs the size of its vocabulary."""
        if decoder and not encoder and self.decoder_vocab_size is None:
            spelled_out = copy.copy(self)
            spelled_out.decoder_vocab_size = self.vocab_size
            return spelled_out.get_text_config(decoder=True)
        return super().get_text_config(decoder, encoder)

    def head_shapes(self, num_heads: int) -> tuple[HeadShape, HeadShape, HeadShape]:
        """Heads of queries, keys and values in a stack with that number of softmax maps.

        A fused projection has its rows in this order.
        """
        key_heads, value_heads = self.key_heads or num_heads, self.value_heads or num_heads
        keys = HeadShape(key_heads, self.d_k or self.d_model // key_heads)
        values = HeadShape(value_heads, self.d_v or self.d_model // value_heads)
        return keys, keys, values

    def validate_architecture(self) -> None:
        """Checks the rules between fields and reports all faults together.

        Raises:
            ValueError: If any rule is broken (`@strict` re-raises it as StrictDataclassError).
        """
        super().validate_architecture()
        faults = self._size_faults() + self._head_faults() + self._position_faults()
        faults += self._token_faults()
        faults += [
            f"`{name}` must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}."
            for name, choices in (CHOICES | {"activation_function": sorted(ACT2FN)}).items()
            if getattr(self, name) not in choices
        ]
        if self.share_encoder_decoder_embeddings and self.target_vocab_size != self.vocab_size:
            faults.append(
                "`decoder_vocab_size` must be `vocab_size` where source and target share a table, "
                f"got {self.decoder_vocab_size} and {self.vocab_size}. Set "
                "`share_encoder_decoder_embeddings` to False."
            )
        if not self.is_encoder_decoder:
            faults.append("`is_encoder_decoder` must be True, got False. Leave it out.")
        if faults:
            raise ValueError("\n".join(faults))

    def _size_faults(self) -> list[str]:
        faults = [
            f"`{name}` must be at least 1, got {getattr(self, name)}."
            for name in _COUNTS
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        faults += [
            f"`{name}` must be at least 0 and below 1, got {getattr(self, name)}."
            for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
            if not 0 <= getattr(self, name) < 1
        ]
        # Written so that NaN fails.
        faults += [
            f"`{name}` must be above 0 and {'finite' if limit == inf else f'below {limit}'}, got "
            f"{getattr(self, name)}."
            for name, limit in (("layer_norm_eps", 2), ("position_base", inf), ("init_std", inf))
            if getattr(self, name) is not None and not 0 < getattr(self, name) < limit
        ]
        return faults

    def _position_faults(self) -> list[str]:
        faults = []
        if self.position_offset < 0:
            faults.append(f"`position_offset` must be at least 0, got {self.position_offset}.")
        if self.d_model % 2 and self.position_embedding_type.startswith("sinusoidal"):
            faults.append(
                f"`d_model` must be even, for pairs of sine and cosine, got {self.d_model}."
            )
        if self.position_embedding_type == "rotary":
            heads = (self.encoder_attention_heads, self.decoder_attention_heads)
            sizes = {self.head_shapes(max(1, one))[0].size for one in heads}
            faults += [
                "Rotary positions turn pairs of columns, so keys must have an even size, got "
                f"{size} for each head. Set `d_k` to an even number."
                for size in sorted(sizes)
                if size % 2
            ]
        return faults

    def _head_faults(self) -> list[str]:
        faults = []
        for name, size, mixing in (
            ("key_heads", "d_k", "logits"),
            ("value_heads", "d_v", "weights"),
        ):
            for stack in ("encoder_attention_heads", "decoder_attention_heads"):
                maps, given = getattr(self, stack), getattr(self, name)
                heads, heads_name = (maps, stack) if given is None else (given, name)
                if heads != maps and self.talking_heads not in (mixing, "both"):
                    faults.append(
                        f"`{name}` must be `{stack}` without `talking_heads` to mix them, got "
                        f"{heads}, {maps} and {self.talking_heads!r}. Leave it out, or set "
                        f"`talking_heads` to {mixing!r} or 'both'."
                    )
                if getattr(self, size) is None and heads >= 1 and self.d_model % heads:
                    faults.append(
                        f"`d_model` must be a multiple of `{heads_name}`, got {self.d_model} and "
                        f"{heads}. Change either one, or set `{size}`."
                    )
        return list(dict.fromkeys(faults))

    def _token_faults(self) -> list[str]:
        faults = [
            f"`{name}` must be at least 0 and below `{size_name}`, got {token} and {size}."
            for size_name in ("vocab_size", "decoder_vocab_size")
            for size in [getattr(self, size_name)]
            if size is not None
            for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
            for tokens in [getattr(self, name)]
            for token in (tokens if isinstance(tokens, list) else [tokens])
            if token is not None and not 0 <= token < size
        ]
        if self.pad_token_id in self.eos_token_ids:
            faults.append(
                "`eos_token_id` must differ from `pad_token_id`, which is never generated, got "
                f"{self.eos_token_id} and {self.pad_token_id}. Give the two tokens ids of their "
                "own."
            )
        return faults


VanillaTransformerConfig.register_for_auto_class()

__all__ = ["VanillaTransformerConfig"]
