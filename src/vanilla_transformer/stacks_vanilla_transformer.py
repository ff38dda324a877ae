"""The stacks of section 3.1: embeddings (3.4), positions (3.5), masks (3.2.3), then the layers.

Shapes: B batch · S source · T target · Q positions of either · D `d_model` · E head size.
"""

import copy
import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import CACHE
from .layers_vanilla_transformer import (
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    SelfAttention,
    build_norm,
    is_flash,
)
from .pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel


class Sinusoids(nn.Module):
    """Angles with wavelengths from 2 pi to 2 pi times the base.

    Nothing is stored, so nothing can be lost in loading, and sequences may have any length.
    """

    def __init__(self, config: VanillaTransformerConfig, width: int) -> None:
        super().__init__()
        self.offset = config.position_offset
        # Derived in float64, whatever the dtype of the weights.
        self.frequencies = [
            config.position_base ** (-column / width) for column in range(0, width, 2)
        ]

    def angles(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Angles of positions, counted from 0: `[1 or B, Q]` -> `[1 or B, Q, width / 2]`.

        They are computed in float32, or in float64 for a float64 model.
        """
        angle_dtype = torch.promote_types(dtype, torch.float32)
        frequencies = torch.tensor(self.frequencies, dtype=angle_dtype)
        # A blocking copy would wait for all that the device has to do.
        frequencies = frequencies.to(position_ids.device, non_blocking=True)
        return (position_ids + self.offset)[..., None].to(angle_dtype) * frequencies


class SinusoidalPositions(Sinusoids):
    """Sines and cosines, added to the embeddings (section 3.5)."""

    act_in_attention = False

    def __init__(self, config: VanillaTransformerConfig, num_heads: int) -> None:
        super().__init__(config, config.d_model)
        self.is_interleaved = config.position_embedding_type == "sinusoidal"

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Encodes positions, counted from 0: `[1 or B, Q]` -> `[1 or B, Q, D]`.

        Sines are in the even columns and cosines in the odd ones, or, not interleaved, sines in
        the first half.
        """
        angles = self.angles(position_ids, dtype)
        pair_axis = -1 if self.is_interleaved else -2
        return torch.stack((angles.sin(), angles.cos()), dim=pair_axis).flatten(-2).to(dtype)


class RotaryPositions(Sinusoids):
    """Angles by which self-attention turns queries and keys (RoFormer, arXiv 2104.09864)."""

    act_in_attention = True

    def __init__(self, config: VanillaTransformerConfig, num_heads: int) -> None:
        super().__init__(config, config.head_shapes(num_heads)[0].size)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosine and sine for each pair of columns, `[1 or B, Q]` -> `[1 or B, Q, E / 2, 2]`."""
        angles = self.angles(position_ids, dtype)
        return torch.stack((angles.cos(), angles.sin()), dim=-1).to(dtype)


class LearnedPositions(nn.Embedding):
    """A learned row for each position (section 3.5, table 3 row E)."""

    act_in_attention = False

    def __init__(self, config: VanillaTransformerConfig, num_heads: int) -> None:
        super().__init__(config.max_position_embeddings + config.position_offset, config.d_model)
        self.offset = config.position_offset

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """Looks up positions, counted from 0: `[1 or B, Q]` -> `[1 or B, Q, D]`."""
        return super().forward(position_ids + self.offset).to(dtype)


# Each is built with the config and its stack's number of heads.
POSITIONS = {
    "sinusoidal": SinusoidalPositions,
    "sinusoidal_concatenated": SinusoidalPositions,
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
}


def causal_mask(
    config: VanillaTransformerConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> Any:
    """Mask of the decoder's self-attention (section 3.2.3), in the form of the config's kernel.

    Args:
        config: Names the kernel.
        inputs_embeds: `[B, T, D]`.
        attention_mask: 1 = real token, `[B, past + T]`; None: all are.
        cache: Cache of the self-attention.

    Raises:
        ValueError: If flex attention is to read a static cache.
    """
    if cache is not None and cache.is_compileable:
        kernel = config._attn_implementation
        if kernel == "flex_attention":
            raise ValueError(
                "Flex attention reads the length of a static cache after the cache has grown, got "
                "`flex_attention` and a static cache. Use `attn_implementation='sdpa'`, or leave "
                "out `cache_implementation`."
            )
        if attention_mask is None and is_flash(kernel):
            # Without a mask, flash kernels also attend to the unused end of the cache.
            size = (len(inputs_embeds), int(cache.get_seq_length()) + inputs_embeds.shape[1])
            attention_mask = inputs_embeds.new_ones(size)
    # By position: the cache's name is another one since Transformers 5.24.
    return create_causal_mask(config, inputs_embeds, attention_mask, cache)


class Stack(VanillaTransformerPreTrainedModel):
    """Common to encoder and decoder: embedding, positions, dropout, final norm."""

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, num_heads: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, config.pad_token_id)
        self.embed_positions = POSITIONS[config.position_embedding_type](config, num_heads)
        # For positions that are not added to the embeddings.
        self.has_positions_in_attention = self.embed_positions.act_in_attention
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.embed_layer_norm: nn.Module = nn.Identity()
        if config.embedding_layer_norm:
            self.embed_layer_norm = build_norm(config)
        self.layer_norm: nn.Module = nn.Identity()
        has_norm = config.add_final_layer_norm
        if config.pre_norm if has_norm is None else has_norm:
            self.layer_norm = build_norm(config)
        self.gradient_checkpointing = False
        # For calls that ask for attention weights, which only eager attention forms.
        self.eager_config = copy.copy(config)
        self.eager_config._attn_implementation = "eager"

    def lookup(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Rows of the table `[B, Q, D]`, unscaled, as `inputs_embeds` are.

        Raises:
            ValueError: If both or neither are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(
                f"{type(self).__name__} needs either token ids or embeddings, got {given}. "
                "Pass (decoder_)input_ids or (decoder_)inputs_embeds."
            )
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def positions_of(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, past_length: int | Tensor = 0
    ) -> Tensor:
        """Encoded positions, which count real tokens: padding on either side changes none.

        Args:
            inputs_embeds: Rows of the table, `[B, Q, D]`.
            attention_mask: 1 = real token, `[B, past_length + Q]`; with None or a mask of more
                dimensions every token counts.
            past_length: Number of positions in the cache.
        """
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None] + past_length
        return self.encode_positions(position_ids, inputs_embeds.dtype, past_length + length)

    def encode_positions(
        self, position_ids: Tensor, dtype: torch.dtype, longest: int | Tensor
    ) -> Tensor:
        """Encodes positions counted from 0, `[1 or B, Q]` -> `[1 or B, Q, ...]`.

        The longest sequence has `longest` positions, padding counted.

        Raises:
            ValueError: If a position is beyond the end of a table of learned ones.
        """
        end = self.config.last_position
        # Compiled code checks indices itself; on the meta device there are none.
        is_checked = not (torch.compiler.is_compiling() or position_ids.is_meta)
        # Reading positions waits for a GPU, so the length is compared first.
        if end < math.inf and is_checked and longest > end:
            longest = int(position_ids.max()) + 1
            if longest > end:
                raise ValueError(
                    f"Learned positions end after {end} tokens (`max_position_embeddings`), got a "
                    f"sequence of {longest}. Cut it, or train a model with more positions, or "
                    "with sinusoidal ones, which have no end."
                )
        return self.embed_positions(position_ids, dtype)

    def embed(self, inputs_embeds: Tensor, positions: Tensor) -> Tensor:
        """Sections 3.4 and 3.5: lookups times sqrt(D) plus positions, then dropout, `[B, Q, D]`."""
        hidden_states = inputs_embeds * self.embed_scale
        if not self.has_positions_in_attention:
            hidden_states = hidden_states + positions
        return self.dropout(self.embed_layer_norm(hidden_states))

    def run_layers(
        self, hidden_states: Tensor, *inputs: Any, positions: Tensor, **kwargs: Any
    ) -> Tensor:
        """All layers and the final norm, `[B, Q, D]` -> `[B, Q, D]`.

        Each layer gets the further inputs, with masks in the form of the kernel, which
        `attn_implementation` names, and the encoded positions if they act inside attention.
        """
        if self.has_positions_in_attention:
            kwargs["positions"] = positions
        for layer in self.layers:
            hidden_states = layer(hidden_states, *inputs, **kwargs)
        return self.layer_norm(hidden_states)

    def attention_config(self, **kwargs: Any) -> VanillaTransformerConfig:
        """The config that names the attention kernel of this call: eager if it asks for weights."""
        wants_weights = kwargs.get("output_attentions", self.config.output_attentions)
        return self.eager_config if wants_weights else self.config


class Encoder(Stack):
    """Encoder of section 3.1."""

    _can_record_outputs = {  # noqa: RUF012  (Transformers' attribute)
        "hidden_states": EncoderLayer,
        "attentions": OutputRecorder(SelfAttention, 1),
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config, config.vocab_size, config.encoder_attention_heads)
        self.layers = nn.ModuleList(
            EncoderLayer(config, layer_idx) for layer_idx in range(config.encoder_layers)
        )
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encodes sources.

        Args:
            input_ids: Tokens `[B, S]`.
            attention_mask: 1 = real token, `[B, S]`; None: all are.
            inputs_embeds: Instead of `input_ids`: rows of the table, unscaled, `[B, S, D]`.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, S, D]`.
        """
        inputs_embeds = self.lookup(input_ids, inputs_embeds)
        positions = self.positions_of(inputs_embeds, attention_mask)
        config = self.attention_config(**kwargs)
        mask = create_bidirectional_mask(config, inputs_embeds, attention_mask)
        hidden_states = self.run_layers(
            self.embed(inputs_embeds, positions),
            mask,
            positions=positions,
            attn_implementation=config._attn_implementation,
        )
        return BaseModelOutput(last_hidden_state=hidden_states)


DECODER_STATES = OutputRecorder(DecoderLayer)
# Which states a negative number means; older releases of Transformers select none.
DECODER_STATES.num_hidden_layers_key = "decoder_layers"


class Decoder(Stack):
    """Decoder of section 3.1."""

    _can_record_outputs = {  # noqa: RUF012  (Transformers' attribute)
        "hidden_states": DECODER_STATES,
        "attentions": OutputRecorder(SelfAttention, 1),
        "cross_attentions": OutputRecorder(CrossAttention, 1),
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config, config.target_vocab_size, config.decoder_attention_heads)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)
        )
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes targets: all positions, or the ones after those in the cache.

        Args:
            input_ids: Tokens `[B, T]`.
            attention_mask: 1 = real token, `[B, past + T]`; None: all are.
            encoder_hidden_states: The encoder's output, `[B, S, D]`.
            encoder_attention_mask: 1 = real source token, `[B, S]`; None: all are.
            cache: Keys and values of earlier positions; extended in place.
            inputs_embeds: Instead of `input_ids`: rows of the table, unscaled, `[B, T, D]`.
            use_cache: Starts a cache if none is given.
            past_key_values: The cache by its name before Transformers 5.24.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, T, D]` and the cache.
        """
        inputs_embeds = self.lookup(input_ids, inputs_embeds)
        cache = self.checked_cache(past_key_values if cache is None else cache, use_cache)
        past_length = 0 if cache is None else cache.get_seq_length()
        positions = self.positions_of(inputs_embeds, attention_mask, past_length)
        config = self.attention_config(**kwargs)
        self_cache = None if cache is None else cache.self_attention_cache
        mask = causal_mask(config, inputs_embeds, attention_mask, self_cache)
        encoder_mask = create_bidirectional_mask(
            config, inputs_embeds, encoder_attention_mask, encoder_hidden_states
        )
        hidden_states = self.run_layers(
            self.embed(inputs_embeds, positions),
            mask,
            encoder_hidden_states,
            encoder_mask,
            cache,
            positions=positions,
            attn_implementation=config._attn_implementation,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, **{CACHE: cache}
        )

    def checked_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache of a call: the given one, or a new one.

        Raises:
            ValueError: If a cache comes with gradient checkpointing in training.
        """
        if use_cache and cache is None:
            cache = DynamicCache()
        if cache is None:
            return None
        if self.training and self.gradient_checkpointing and torch.is_grad_enabled():
            raise ValueError(
                "Gradient checkpointing runs each layer twice, which would extend a cache twice, "
                "got both in training. Leave out the cache, or call `model.eval()`."
            )
        if isinstance(cache, EncoderDecoderCache):
            return cache
        # One of the targets only: sources are projected anew in each call.
        return EncoderDecoderCache(cache, DynamicCache())
