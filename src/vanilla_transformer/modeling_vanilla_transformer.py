"""The encoder-decoder Transformer of "Attention Is All You Need" (arXiv 1706.03762).

Shapes: B batch · S source · T target · Q, K query and key positions · D `d_model` · H heads ·
E head size · F feed-forward · V vocabulary · N real target positions of a batch.

Differs from the paper:
    The layer norm stands before each sublayer (pre-norm, Xiong et al. 2020), not behind the
    residual sum, and a final one closes each stack: deep stacks then train without care.
"""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import VanillaTransformerGenerationMixin
from .kernels_vanilla_transformer import (
    Dropout,
    causal_mask,
    drop_padding,
)
from .loss_vanilla_transformer import IGNORED, cross_entropy_sum, projected_cross_entropy_sum


def sinusoidal_positions(position_ids: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Positional encoding of section 3.5: sines in the even columns, cosines in the odd ones.

    Nothing is stored, so nothing can be lost in loading and no position is too far. The
    frequencies are derived in float64 and the angles taken in float32 (float64 for a float64
    model) whatever the dtype of the weights.

    Args:
        position_ids: Positions, counted from 0, `[B, Q]` or `[1, Q]`.
        d_model: Width D.
        dtype: Of the result.

    Returns:
        `[B, Q, D]` or `[1, Q, D]`.
    """
    frequencies = [10_000 ** (-column / d_model) for column in range(0, d_model, 2)]
    angle_dtype = torch.promote_types(dtype, torch.float32)
    angles = position_ids[..., None].to(angle_dtype) * torch.tensor(
        frequencies, dtype=angle_dtype, device=position_ids.device
    )
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention, equation (1), with the softmax in float32 or wider.

    Args:
        module: The attention module; tells whether dropout is on.
        query: `[B, H, Q, E]`.
        key: `[B, H, K, E]`.
        value: `[B, H, K, E]`.
        attention_mask: Added to the scores, `[B, 1, Q, K]`.
        scaling: 1 / sqrt(d_k).
        dropout: Rate on the attention weights.
        kwargs: What other kernels of Transformers' registry take.

    Returns:
        The heads' outputs `[B, Q, H, E]` and the attention weights `[B, H, Q, K]`.
    """
    scores = query @ key.transpose(-2, -1) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=softmax_dtype).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class FusedLinear(nn.Linear):
    """Several linear maps of the same input as one matrix product.

    Args:
        in_features: Width of the input.
        row_counts: Output width of each logical matrix; its rows follow one another.
    """

    def __init__(self, in_features: int, row_counts: tuple[int, ...]) -> None:
        super().__init__(in_features, sum(row_counts))
        self.row_counts = row_counts


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Attention(nn.Module):
    """Multi-head attention of section 3.2.2, but for the projections into heads."""

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.head_dim = config.d_model // num_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.layer_idx = layer_idx
        # Transformers' kernels read it when they get no mask.
        self.is_causal = is_causal
        self.out_proj = nn.Linear(num_heads * self.head_dim, config.d_model)

    def split_heads(self, projected: Tensor) -> list[Tensor]:
        """Cuts a fused projection into queries, keys and values, in that order, and into heads.

        The only code that knows how rows are ordered: query, key, value; each head contiguous.

        Args:
            projected: One to three matrices side by side, `[B, Q, n * H * E]`.

        Returns:
            One `[B, H, Q, E]` for each of the n matrices.
        """
        batch, length, _ = projected.shape
        parts = projected.reshape(batch, length, -1, self.num_heads, self.head_dim).unbind(-3)
        return [part.transpose(1, 2) for part in parts]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_implementation: str,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the chosen kernel and joins the heads.

        Returns:
            The sublayer's output `[B, Q, D]` and the attention weights `[B, H, Q, K]`, None from
            a kernel that never forms them.
        """
        kernel: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            attn_implementation, eager_attention_forward
        )
        device, dtype = query.device.type, query.dtype
        # The backward pass of torch's CPU kernel is ten times slower in bfloat16 than in float32.
        widened = device == "cpu" and query.requires_grad
        if widened:
            query, key, value = (_at_least_float32(x) for x in (query, key, value))
        with torch.autocast(device, enabled=False) if widened else nullcontext():
            heads, weights = kernel(
                self,
                query,
                key,
                value,
                attention_mask,
                dropout=self.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )
        return self.out_proj(heads.flatten(-2).to(dtype)), weights


class SelfAttention(Attention):
    """Attention of a sequence to itself."""

    def __init__(
        self,
        config: VanillaTransformerConfig,
        num_heads: int,
        layer_idx: int | None = None,
        is_causal: bool = False,
    ) -> None:
        super().__init__(config, num_heads, layer_idx, is_causal)
        self.qkv_proj = FusedLinear(config.d_model, (num_heads * self.head_dim,) * 3)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends within `hidden_states` `[B, Q, D]`, behind what the cache holds.

        Returns:
            As `attend`.
        """
        query, key, value = self.split_heads(self.qkv_proj(hidden_states))
        if past_key_values is not None:
            cache = past_key_values.self_attention_cache
            key, value = cache.update(key, value, self.layer_idx)
        return self.attend(query, key, value, attention_mask, **kwargs)


class CrossAttention(Attention):
    """Attention of the target to the encoder's output ("encoder-decoder attention")."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int) -> None:
        super().__init__(config, num_heads, layer_idx)
        self.q_proj = nn.Linear(config.d_model, num_heads * self.head_dim)
        self.kv_proj = FusedLinear(config.d_model, (num_heads * self.head_dim,) * 2)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `hidden_states` `[B, T, D]` to `encoder_hidden_states` `[B, S, D]`.

        Returns:
            As `attend`.
        """
        (query,) = self.split_heads(self.q_proj(hidden_states))
        key, value = self.source_keys_and_values(encoder_hidden_states, past_key_values)
        kernel = kwargs["attn_implementation"]
        if attention_mask is not None and is_flash_attention_requested(None, kernel):
            key, value, lengths = drop_padding(key, value, attention_mask, query.shape[2])
            return self.attend(query, key, value, None, **lengths, **kwargs)
        return self.attend(query, key, value, attention_mask, **kwargs)

    def source_keys_and_values(
        self, encoder_hidden_states: Tensor, past_key_values: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """Projects the source once per sentence: later steps find the result in the cache.

        Returns:
            Keys and values, each `[B, H, S, E]`.
        """
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            # An offloading cache brings back what is updated; these rest in the CPU's memory.
            device = encoder_hidden_states.device
            return layer.keys.to(device), layer.values.to(device)
        key, value = self.split_heads(self.kv_proj(encoder_hidden_states))
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return key, value


class Layer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: residual connections and the feed-forward network.

    Args:
        config: Of the model.
        ffn_dim: Inner width F of the feed-forward network.
    """

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)

    def residual(
        self, x: Tensor, norm: nn.LayerNorm, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Residual connection of section 3.1; the one place that knows where the norm goes."""
        return x + self.dropout(sublayer(norm(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Position-wise feed-forward network, equation (2): `[B, Q, D]` -> `[B, Q, D]`."""
        return self.fc2(self.activation_dropout(self.activation(self.fc1(x))))


class EncoderLayer(Layer):
    """Encoder layer of section 3.1: self-attention, then a feed-forward network."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """`[B, S, D]` -> `[B, S, D]`."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask, **kwargs)[0],
        )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)


class DecoderLayer(Layer):
    """Decoder layer of section 3.1: causal self-attention, cross-attention, feed-forward."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, config.decoder_ffn_dim)
        num_heads = config.decoder_attention_heads
        self.self_attn = SelfAttention(config, num_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.encoder_attn = CrossAttention(config, num_heads, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        hidden_states = self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, attention_mask, past_key_values, **kwargs)[0],
        )
        hidden_states = self.residual(
            hidden_states,
            self.encoder_attn_layer_norm,
            lambda x: self.encoder_attn(
                x, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
            )[0],
        )
        return self.residual(hidden_states, self.final_layer_norm, self.feed_forward)


class VanillaTransformerPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, common to all classes of this model."""

    config: VanillaTransformerConfig
    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]  # noqa: RUF012  (Transformers' attribute)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass elsewhere, such as FSDP makes, registers itself if its code shall travel."""
        super().__init_subclass__(**kwargs)
        cls._auto_class = None

    def post_init(self) -> None:
        """Trainer takes tied copies, which no file holds, for lost unless they stand here."""
        super().post_init()
        self._keys_to_ignore_on_save |= self.all_tied_weights_keys.keys()

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """Transformers takes a table that stands in three places for loaded, held or not."""
        table = self.get_input_embeddings().weight
        is_loaded = getattr(table, "_is_hf_initialized", False)
        missing = loading_info.missing_keys & {"shared.weight", "model.shared.weight"}
        super().mark_tied_weights_as_initialized(loading_info)
        if not is_loaded:
            loading_info.missing_keys |= missing

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier-uniform for each logical matrix, N(0, 1/D) for tables, zero biases.

        A table's lookups are scaled by sqrt(D) and so start with unit variance. Matrices that know
        their depth start smaller the deeper they are (`depth_scaled_init`).
        """
        if isinstance(module, nn.Embedding):
            self._init_table(module.weight)
        elif isinstance(module, nn.Linear):
            gain = getattr(module, "depth", 1) ** -0.5
            matrices = [
                nn.init.xavier_uniform_(torch.empty(rows, module.in_features), gain)
                for rows in getattr(module, "row_counts", (module.out_features,))
            ]
            init.copy_(module.weight, torch.cat(matrices))
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def _init_table(self, weight: Tensor) -> None:
        table = torch.empty(weight.shape).normal_(std=self.config.d_model**-0.5)
        table[self.config.pad_token_id] = 0
        init.copy_(weight, table)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Saves as Transformers does, with a config that leads every Auto class to its code."""
        modeling = "modeling_vanilla_transformer.VanillaTransformer"
        self.config.auto_map = {
            "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
            "AutoModel": f"{modeling}Model",
            "AutoModelForSeq2SeqLM": f"{modeling}ForConditionalGeneration",
        }
        super().save_pretrained(save_directory, **kwargs)
        # Of a subclass, Transformers copies no file, or the file of the subclass.
        custom_object_save(VanillaTransformerModel, save_directory)


class Stack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embedding, positions, dropout, final norm."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = Dropout(config.dropout)
        self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.gradient_checkpointing = False

    def number_matrices(self) -> None:
        """Tells the modules of each layer its depth, if their first values depend on it."""
        for depth, layer in enumerate(self.layers if self.config.depth_scaled_init else (), 1):
            for module in layer.modules():
                module.depth = depth

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

    def add_positions(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, past_length: int | Tensor = 0
    ) -> Tensor:
        """Sections 3.4 and 3.5: lookups times sqrt(D) plus positions, then dropout.

        Positions count real tokens, so that padding on either side moves nothing.

        Args:
            inputs_embeds: Rows of the table, `[B, Q, D]`.
            attention_mask: 1 = real token, `[B, past_length + Q]`; None or a mask of more
                dimensions counts every token.
            past_length: Positions that the cache holds.

        Returns:
            `[B, Q, D]`.
        """
        length = inputs_embeds.shape[1]
        if attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        else:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None] + past_length
        return self.embed(inputs_embeds, self.encode_positions(position_ids, inputs_embeds.dtype))

    def encode_positions(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Encoding of positions `[B, Q]` or `[1, Q]`, with a last axis D."""
        return sinusoidal_positions(position_ids, self.config.d_model, dtype)

    def embed(self, inputs_embeds: Tensor, positions: Tensor) -> Tensor:
        """Adds encoded positions to lookups times sqrt(D), `[B, Q, D]`."""
        return self.dropout(inputs_embeds * self.embed_scale + positions)

    def attention_config(self, **kwargs: Any) -> VanillaTransformerConfig:
        """The config whose attention kernel this call uses; nothing is mutated.

        Only eager attention forms the weights that `output_attentions` asks for.
        """
        if not kwargs.get("output_attentions", self.config.output_attentions):
            return self.config
        config = copy.copy(self.config)
        config._attn_implementation_internal = "eager"
        return config


class Encoder(Stack):
    """Encoder of section 3.1."""

    _can_record_outputs = {  # noqa: RUF012  (Transformers' attribute)
        "hidden_states": EncoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.number_matrices()
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
        hidden_states = self.add_positions(inputs_embeds, attention_mask)
        config = self.attention_config(**kwargs)
        mask = create_bidirectional_mask(config, inputs_embeds, attention_mask)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, mask, attn_implementation=config._attn_implementation
            )
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class Decoder(Stack):
    """Decoder of section 3.1."""

    _can_record_outputs = {  # noqa: RUF012  (Transformers' attribute)
        "hidden_states": OutputRecorder(DecoderLayer),
        "attentions": OutputRecorder(SelfAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)
        )
        self.number_matrices()
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes targets, all positions at once or behind those in `past_key_values`.

        Args:
            input_ids: Tokens `[B, T]`.
            attention_mask: 1 = real token, `[B, past + T]`; None: all are.
            encoder_hidden_states: The encoder's output, `[B, S, D]`.
            encoder_attention_mask: 1 = real source token, `[B, S]`; None: all are.
            past_key_values: Keys and values of earlier positions; extended in place.
            inputs_embeds: Instead of `input_ids`: rows of the table, unscaled, `[B, T, D]`.
            use_cache: Starts a cache where `past_key_values` is None.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, T, D]` and the cache.
        """
        inputs_embeds = self.lookup(input_ids, inputs_embeds)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(
                DynamicCache(config=self.config), DynamicCache(config=self.config)
            )
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden_states = self.add_positions(inputs_embeds, attention_mask, past_length)

        config = self.attention_config(**kwargs)
        self_cache = None if past_key_values is None else past_key_values.self_attention_cache
        mask = causal_mask(config, inputs_embeds, attention_mask, self_cache)
        encoder_mask = create_bidirectional_mask(
            config, inputs_embeds, encoder_attention_mask, encoder_hidden_states
        )
        hidden_states = self.run_layers(
            hidden_states,
            mask,
            encoder_hidden_states,
            encoder_mask,
            past_key_values,
            config._attn_implementation,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )

    def run_layers(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor | None,
        encoder_attention_mask: Tensor | None,
        past_key_values: EncoderDecoderCache | None,
        attn_implementation: str,
    ) -> Tensor:
        """All layers and the final norm, `[B, T, D]` -> `[B, T, D]`, with masks as kernels take."""
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values=past_key_values,
                attn_implementation=attn_implementation,
            )
        return self.layer_norm(hidden_states)


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder over one shared embedding table, without the output projection."""

    _tied_weights_keys = {  # noqa: RUF012  (Transformers' attribute)
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        # One module, not three that share a weight: FSDP shards no weight twice.
        self.set_input_embeddings(self.shared)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Both stacks read `shared` always; `tie_word_embeddings` is about the projection alone."""
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of both stacks."""
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the table of both stacks."""
        self.shared = value
        self.encoder.embed_tokens = value
        self.decoder.embed_tokens = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encodes sources, unless `encoder_outputs` are given, and decodes targets.

        Args:
            input_ids: Source tokens `[B, S]`.
            attention_mask: 1 = real source token, `[B, S]`; None: all are.
            decoder_input_ids: Target tokens, shifted right, `[B, T]`.
            decoder_attention_mask: 1 = real target token, `[B, past + T]`; None: all are. Targets
                padded on the right need none: no real token sees what follows it.
            encoder_outputs: What the encoder returned for these sources.
            past_key_values: Keys and values of earlier target positions; extended in place.
            inputs_embeds: Instead of `input_ids`: rows of the table, unscaled, `[B, S, D]`.
            decoder_inputs_embeds: Instead of `decoder_input_ids`, `[B, T, D]`.
            use_cache: Returns `past_key_values` for decoding on.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, T, D]`, the cache and what was asked for of both stacks.
        """
        if encoder_outputs is None:
            encoded = self.encoder(input_ids, attention_mask, inputs_embeds, **kwargs)
        elif isinstance(encoder_outputs, tuple):
            encoded = BaseModelOutput(*encoder_outputs)
        else:
            encoded = encoder_outputs
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            encoded.last_hidden_state,
            attention_mask,
            past_key_values,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin
):
    """The complete model: encoder, decoder, output projection, loss and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}  # noqa: RUF012

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        # Transformers' own default stops after 20 tokens.
        self.generation_config.max_length = config.max_position_embeddings
        silent = [config.pad_token_id, config.bos_token_id]
        self.generation_config.bad_words_ids = [[token] for token in silent if token is not None]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """An output projection of its own starts like the table that it stands for."""
        if module is self.lm_head:
            with torch.no_grad():
                self._init_table(module.weight)
        else:
            super()._init_weights(module)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shifts targets right behind the start token, `[B, T]` -> `[B, T]` (figure 1)."""
        shifted = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """As `VanillaTransformerModel.forward`, then logits and, given `labels`, the loss.

        Beyond the arguments of the bare model it takes `labels` `[B, T]`, -100 where no loss is
        wanted, from which it also makes missing `decoder_input_ids`; `logits_to_keep`, the last n
        positions, or a tensor of positions, whose logits are wanted (0: all; not together with
        `labels`); `return_logits`, by which training with `labels` returns all logits too, at the
        price of their memory (distillation, R-Drop); and `num_items_in_batch`, which divides the
        summed loss: Trainer gives the number of targets over all accumulated batches and
        processes, None stands for the targets of this batch.

        Returns:
            `loss`, smoothed in training only, and `logits` `[B, T, V]`: None while training with
            `labels`, unless `return_logits`.

        Raises:
            ValueError: If the loss is taken elsewhere while `config.label_smoothing` is set, or if
                `labels` come with `logits_to_keep`.
        """
        if self.training and labels is None and num_items_in_batch is not None:
            self._refuse_outer_loss()
        if labels is not None:
            self._refuse_partial_logits(logits_to_keep)
            # A loss needs no later steps, and filling a cache copies all keys and values.
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        logits = loss = None
        if labels is None or return_logits or not self.training:
            last = isinstance(logits_to_keep, int)
            kept = slice(-logits_to_keep, None) if last else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
        if labels is not None:
            labels = labels.to(hidden_states.device)
            smoothing = self.config.label_smoothing if self.training else 0.0
            if logits is None:
                total = projected_cross_entropy_sum(self.lm_head, hidden_states, labels, smoothing)
            else:
                total = cross_entropy_sum(logits, labels, smoothing)
            if num_items_in_batch is None:
                num_items_in_batch = (labels != IGNORED).sum()
            # Without any target the loss is 0, not 0 / 0.
            loss = total / torch.as_tensor(num_items_in_batch).clamp(min=1)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _refuse_partial_logits(self, logits_to_keep: int | Tensor) -> None:
        """The loss is about all targets.

        Raises:
            ValueError: If fewer logits than that are wanted.
        """
        if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
            raise ValueError(
                "`labels` need the logits of all target positions, that is `logits_to_keep=0`, "
                f"got `logits_to_keep={logits_to_keep}`. Leave out either one; to exclude targets "
                f"from the loss, set their labels to {IGNORED}."
            )

    def _refuse_outer_loss(self) -> None:
        """Trainer's own label smoothing, or a loss function of the user's, takes the labels away.

        Raises:
            ValueError: If the config asks the model for smoothing all the same.
        """
        if self.config.label_smoothing:
            raise ValueError(
                "The loss is taken outside the model, which is told to smooth its own: "
                f"`config.label_smoothing` is {self.config.label_smoothing}. Set it to 0, or leave "
                "`label_smoothing_factor` at 0 and pass no loss function to Trainer."
            )


VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = [
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
