"""Initialisation, tying, saving and resizing of the model's weights."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers_vanilla_transformer import Layer


def _refuse_kernel_of_talking_heads(config: VanillaTransformerConfig, kernel: Any) -> None:
    if config.talking_heads is not None and kernel not in (None, "eager"):
        raise ValueError(
            "`talking_heads` mix the score maps of all heads, and only eager attention forms "
            "these: other kernels compute heads separately. `attn_implementation` must be 'eager', "
            f"got {kernel!r}. Leave it out."
        )


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

    def __init__(self, config: VanillaTransformerConfig, *args: Any, **kwargs: Any) -> None:
        if config.talking_heads is not None:
            _refuse_kernel_of_talking_heads(config, config._attn_implementation)
            config._attn_implementation = "eager"
        super().__init__(config, *args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Subclasses, such as FSDP's, must register themselves to save their code."""
        super().__init_subclass__(**kwargs)
        cls._auto_class = None

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Without this, Trainer reports tied weights as missing: files store them once."""
        super().tie_weights(*args, **kwargs)
        self._keys_to_ignore_on_save = self._tied_names()

    def _tied_names(self) -> set[str]:
        """Names of the weights that are tied to others, as the config has it and in fact."""
        weights = dict(self.named_parameters(remove_duplicate=False))
        tied = self.all_tied_weights_keys.items()
        return {name for name, other in tied if weights.get(name) is weights.get(other)}

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """Reports a shared table that no file held; Transformers takes it for loaded."""
        tables = loading_info.missing_keys & set(self.all_tied_weights_keys.values())
        missing = {
            name
            for name in tables
            if not getattr(self.get_parameter(name), "_is_hf_initialized", False)
        }
        super().mark_tied_weights_as_initialized(loading_info)
        loading_info.missing_keys |= missing

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any
    ) -> None:
        """As in Transformers, but talking heads run with eager attention only.

        Raises:
            ValueError: If the model has talking heads and another kernel is requested.
        """
        _refuse_kernel_of_talking_heads(self.config, attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Xavier-uniform for each logical matrix, N(0, 1/D) for tables, zero biases.

        Lookups are scaled by sqrt(D), so they start with unit variance. With `depth_scaled_init`,
        matrices of deeper layers start smaller.
        """
        if isinstance(module, nn.Embedding):
            self._init_table(module.weight, module.padding_idx)
        elif isinstance(module, nn.Linear):
            self._init_linear(module)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif type(module).__module__ == Layer.__module__ and hasattr(module, "reset_parameters"):
            # Such as head mixing: modules of our own say how they start.
            module.reset_parameters()  # type: ignore[operator]
        else:
            super()._init_weights(module)

    def _init_linear(self, module: nn.Linear) -> None:
        """Draws each logical matrix of a fused one apart."""
        rows, depth = (module.out_features,), 1
        for owner in self.modules():
            if isinstance(owner, Layer) and any(part is module for part in owner.modules()):
                depth = owner.layer_idx + 1
            elif getattr(owner, "qkv_proj", None) is module:
                rows = owner.widths
            elif getattr(owner, "kv_proj", None) is module:
                rows = owner.widths[1:]
        gain = depth**-0.5 if self.config.depth_scaled_init else 1.0
        matrices = [self._draw_matrix(count, module.in_features, gain) for count in rows]
        init.copy_(module.weight, torch.cat(matrices))

    def _draw_matrix(self, rows: int, columns: int, gain: float) -> Tensor:
        matrix = torch.empty(rows, columns)
        if self.config.init_std is None:
            return nn.init.xavier_uniform_(matrix, gain)
        return matrix.normal_(std=gain * self.config.init_std)

    def _init_table(self, weight: Tensor, padding_id: int | None) -> None:
        table = torch.empty(weight.shape).normal_(
            std=self.config.init_std or self.config.d_model**-0.5
        )
        if padding_id is not None:
            table[padding_id] = 0
        init.copy_(weight, table)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Embedding:
        """As in Transformers, if source and target share one table.

        Raises:
            ValueError: If each has its own table, and the size changes.
        """
        if not self.config.share_encoder_decoder_embeddings:
            # Transformers' own would tie the projection to the source's table.
            sizes = {self.config.vocab_size, self.config.target_vocab_size}
            wanted = sizes if new_num_tokens is None else {new_num_tokens}
            if sizes == {size + -size % (pad_to_multiple_of or 1) for size in wanted}:
                return self.get_input_embeddings()
            raise ValueError(
                "`resize_token_embeddings` needs a table that source and target share, got a model "
                f"with two tables, {new_num_tokens} tokens and `pad_to_multiple_of="
                f"{pad_to_multiple_of}`. Make a new model and copy the rows that you want to keep."
            )
        table: nn.Embedding = super().resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, *args, **kwargs
        )
        if self.config.decoder_vocab_size is not None:
            self.config.decoder_vocab_size = self.config.vocab_size
        return table

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Saves as Transformers does; the config names the code for each Auto class.

        Raises:
            ValueError: If source and target no longer share the table that the config says they do.
        """
        model: Any = self.base_model
        if getattr(model, "shared", None) is not None and any(
            stack.embed_tokens.weight is not model.shared.weight
            for stack in (model.encoder, model.decoder)
        ):
            raise ValueError(
                "Source and target must share a table, as `share_encoder_decoder_embeddings` says, "
                "got tables of their own, such as from a merged adapter with "
                "`modules_to_save=['embed_tokens']`. Name the table `shared` instead, or train an "
                "adapter of a model with `share_encoder_decoder_embeddings=False`."
            )
        modeling = "modeling_vanilla_transformer.VanillaTransformer"
        self.config.auto_map = {
            "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
            "AutoModel": f"{modeling}Model",
            "AutoModelForSeq2SeqLM": f"{modeling}ForConditionalGeneration",
        }
        # Weights may have been replaced since they were tied.
        self._keys_to_ignore_on_save = self._tied_names()
        if self.get_output_embeddings() is not None:
            # PEFT's merging sets it to False for two tables, whatever is tied.
            self.config.tie_word_embeddings = "lm_head.weight" in self._keys_to_ignore_on_save
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)


class SharedTable(VanillaTransformerPreTrainedModel):
    """A model whose encoder and decoder may share one table of embeddings, section 3.4."""

    encoder: Any
    decoder: Any
    shared: Any

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """`tie_word_embeddings` concerns the projection only; shared tables are always tied."""
        return dict.fromkeys(self._tied_weights_keys, "shared.weight")

    def __setattr__(self, name: str, value: Any) -> None:
        """Puts a replacement of a shared table, such as an adapter, into both stacks."""
        super().__setattr__(name, value)
        if name == "shared":
            self.encoder.embed_tokens = self.decoder.embed_tokens = value

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the source, which may also be the target's."""
        return self.encoder.embed_tokens if self.shared is None else self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the table of the source, also of the target if they share it."""
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
        else:
            self.encoder.embed_tokens = value
