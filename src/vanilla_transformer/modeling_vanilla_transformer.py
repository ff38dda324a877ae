"""The encoder-decoder Transformer of "Attention Is All You Need" (arXiv 1706.03762).

Shapes: B batch · S source · T target · D `d_model` · V vocabulary.

Attention, feed-forward networks and layers (sections 3.2, 3.3 and 3.1) are in
`layers_vanilla_transformer.py`; embeddings, positions, masks and stacks (3.4, 3.5, 3.2.3, 3.1) in
`stacks_vanilla_transformer.py`; initialisation (not in the paper) and tied tables (3.4) in
`pretrained_vanilla_transformer.py`; the loss (5.4) in `loss_vanilla_transformer.py`. These files
are saved with a model. The installed package computes the same in less time and memory, unless the
config has `fast=False`.

Differs from the paper:
    The layer norm comes before each sublayer (pre-norm, Xiong et al. 2020), not after the
    residual sum, and each stack ends in a final one: deep stacks then train without long
    warm-up. `pre_norm=False` selects the paper's order, without the final norms.
"""

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import CACHE, VanillaTransformerGenerationMixin
from .loss_vanilla_transformer import IGNORED, LossTerms, loss_sum
from .pretrained_vanilla_transformer import SharedTable, VanillaTransformerPreTrainedModel
from .stacks_vanilla_transformer import Decoder, Encoder

logger = logging.get_logger(__name__)


class Backend:
    """How a model computes what a device may gain from: here, as in a textbook."""

    def prepare(self, model: nn.Module) -> None:
        """Changes how modules of a new model compute."""

    def loss(
        self, lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, terms: LossTerms
    ) -> Tensor:
        """Sum of the losses of all targets, from `hidden_states` `[B, T, D]`."""
        return loss_sum(lm_head(hidden_states), labels, terms)

    def compile_loss(self, compiler: Any) -> None:
        """Names the backend of `torch.compile` for the loss on a GPU, if it is computed apart."""

    def generate(
        self, model: Any, use_transformers_search: bool | None = None, **arguments: Any
    ) -> Any:
        """Runs a call of `generate`: here, always by a search of Transformers."""
        return GenerationMixin.generate(model, **arguments)


class VanillaTransformerModel(SharedTable):
    """Encoder and decoder over their embedding tables, without the output projection."""

    # The installed package replaces it, see `backend_vanilla_transformer.py`.
    fast_backend = Backend

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        # Registered first, because a shared table is saved under its first name.
        self.register_module("shared", None)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self._tied_weights_keys = {}
        if config.share_encoder_decoder_embeddings:
            # One module, not three that share a weight: FSDP shards no weight twice.
            self.set_input_embeddings(self.encoder.embed_tokens)
            # A pattern, which PEFT does not read: it would put adapters on one table three times.
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": r"shared\.weight",
                "decoder.embed_tokens.weight": r"shared\.weight",
            }
        self.backend = (self.fast_backend if config.fast else Backend)()
        self.backend.prepare(self)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encodes sources, unless `encoder_outputs` are given, and decodes targets.

        Args:
            input_ids: Source tokens `[B, S]`.
            attention_mask: 1 = real source token, `[B, S]`; None: all are.
            decoder_input_ids: Target tokens, shifted right, `[B, T]`.
            decoder_attention_mask: 1 = real target token, `[B, past + T]`; None: all are. Targets
                padded on the right need none: no token attends to later ones.
            encoder_outputs: Output of the encoder for these sources.
            cache: Keys and values of earlier target positions; extended in place.
            inputs_embeds: Instead of `input_ids`: rows of the table, unscaled, `[B, S, D]`.
            decoder_inputs_embeds: Instead of `decoder_input_ids`, `[B, T, D]`.
            use_cache: Returns the cache, to continue decoding.
            past_key_values: The cache by its name before Transformers 5.24.
            kwargs: `output_attentions`, `output_hidden_states`, `return_dict`.

        Returns:
            `last_hidden_state` `[B, T, D]`, the cache and the requested outputs of both stacks.
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
            past_key_values if cache is None else cache,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **{CACHE: getattr(decoder_outputs, CACHE)},
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class OutputWithoutLogits(Seq2SeqLMOutput):
    """Output of a training step, which never holds all logits together."""

    def to_tuple(self) -> tuple[Any, ...]:
        """Only the loss, because code that counts positions expects logits after it."""
        return (self.loss,)


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerPreTrainedModel, VanillaTransformerGenerationMixin
):
    """The complete model: encoder, decoder, output projection, loss and `generate`.

    Its `forward` takes the arguments of the bare model and these:

    - `labels` `[B, T]`, -100 at positions without a target. Missing `decoder_input_ids` are made
      from them.
    - `logits_to_keep`: number of last positions, or a tensor of positions, whose logits are
      returned; 0: all. With `labels` all are.
    - `return_logits`: training with `labels` returns all logits too (distillation), which takes
      their memory.
    - `num_items_in_batch`: divisor of the summed loss. Trainer passes the number of targets in all
      accumulated batches and processes; None: the targets of this batch.
    - `r_drop_alpha`: weight of R-Drop's divergence, for a batch whose second half repeats its first
      (`vanilla_transformer_tools.training.trainer`).
    """

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, config.lm_head_bias)
        is_shared = config.share_encoder_decoder_embeddings
        table = "model.shared" if is_shared else "model.decoder.embed_tokens"
        self._tied_weights_keys = {"lm_head.weight": f"{table}.weight"}
        # Transformers' own default stops after 20 tokens.
        self.generation_config.max_length = config.max_position_embeddings
        never = (config.pad_token_id, config.bos_token_id)
        ends = (None, *config.eos_token_ids)
        self.generation_config.bad_words_ids = [[token] for token in never if token not in ends]
        self.post_init()

    def _init_linear(self, module: nn.Linear) -> None:
        """An untied output projection starts like a table."""
        if module is self.lm_head:
            self._init_table(module.weight, self.config.pad_token_id)
        else:
            super()._init_linear(module)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shifts targets right, after the start token, `[B, T]` -> `[B, T]` (figure 1)."""
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
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        r_drop_alpha: float = 0.0,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """As `VanillaTransformerModel.forward`, then logits and, given `labels`, the loss.

        Returns:
            `loss`, smoothed in training only, and `logits` `[B, T, V]`: None while training with
            `labels`, unless `return_logits`. As a tuple, such an output has only the loss.

        Raises:
            ValueError: If `labels` differ in shape from what the decoder reads, or if
                `r_drop_alpha` comes with an odd number of rows.
        """
        if labels is not None:
            # A loss needs all logits and no later steps; filling a cache copies keys and values.
            use_cache, logits_to_keep = False, 0
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values if cache is None else cache,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        terms = (num_items_in_batch, r_drop_alpha)
        return self._output(outputs, labels, logits_to_keep, return_logits, *terms)

    def _output(
        self,
        outputs: Seq2SeqModelOutput,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        return_logits: bool,
        num_items_in_batch: int | Tensor | None,
        r_drop_alpha: float,
    ) -> Seq2SeqLMOutput:
        """Logits and loss besides the outputs of the bare model."""
        others = {name: x for name, x in outputs.items() if name != "last_hidden_state"}
        hidden_states: Any = outputs.last_hidden_state
        logits = loss = None
        if labels is None or return_logits or not self.training:
            is_count = isinstance(logits_to_keep, int)
            kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
        if labels is None:
            self._warn_of_outer_loss(num_items_in_batch)
        else:
            loss = self._loss(hidden_states, logits, labels, num_items_in_batch, r_drop_alpha)
        output = OutputWithoutLogits if logits is None else Seq2SeqLMOutput
        return output(loss=loss, logits=logits, **others)

    def _loss(
        self,
        hidden_states: Tensor,
        logits: Tensor | None,
        labels: Tensor,
        num_items_in_batch: int | Tensor | None,
        r_drop_alpha: float,
    ) -> Tensor:
        """The loss of a target; without `logits`, they are computed from `hidden_states`."""
        if labels.shape != hidden_states.shape[:-1]:
            raise ValueError(
                "`labels` must have one entry for each target position that the decoder reads, got "
                f"the shapes {[*labels.shape]} and {[*hidden_states.shape[:-1]]} [batch, target]. "
                "It reads `<s>` and all labels but the last, which is what it is given without "
                "`decoder_input_ids`: leave them out."
            )
        if r_drop_alpha and len(labels) % 2:
            raise ValueError(
                "`r_drop_alpha` needs a batch whose second half repeats its first, got "
                f"{len(labels)} rows."
            )
        labels = labels.to(hidden_states.device)
        smoothing = self.config.label_smoothing if self.training else 0.0
        terms = LossTerms(smoothing, r_drop_alpha)
        if logits is None:
            total = self.model.backend.loss(self.lm_head, hidden_states, labels, terms)
        else:
            total = loss_sum(logits, labels, terms)
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum()
        # Without any target the loss is 0, not 0 / 0.
        return total / torch.as_tensor(num_items_in_batch).clamp(min=1)

    def _warn_of_outer_loss(self, num_items_in_batch: int | Tensor | None) -> None:
        """Warns once that the config's label smoothing does not apply to the caller's loss.

        With `label_smoothing_factor`, or the user's own loss function, Trainer keeps the labels
        and computes the loss from the logits, so nothing is smoothed twice.
        """
        if self.training and num_items_in_batch is not None and self.config.label_smoothing:
            logger.warning_once(
                f"`config.label_smoothing` is {self.config.label_smoothing} and has no effect: the "
                "loss is computed outside the model, by Trainer's `label_smoothing_factor` or a "
                "loss function. Set `config.label_smoothing` to 0 to silence this warning, or "
                "leave both arguments out to train with it."
            )


VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = [
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
]
