"""How `generate` differs from Transformers' own: its caches, masks, stop strings and searches."""

import copy
import os
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import (
    GenerationMixin,
    GenerationMode,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import is_flash_attention_requested

from .configuration_vanilla_transformer import VanillaTransformerConfig


class SourceLengthLimit(StoppingCriteria):
    """Ends each sentence at its own limit, whatever batch it is in.

    Args:
        limits: Longest output of each sentence in tokens, start token not counted, `[B]`.
    """

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each of the B * beams hypotheses `[B * beams, T]` has reached its limit."""
        beams = len(input_ids) // len(self.limits)
        return input_ids.shape[1] - 1 >= self.limits.repeat_interleave(beams)


class StopStrings(StoppingCriteria):
    """Ends an output whose last token completes one of several strings.

    Transformers' own class looks at each token of the vocabulary by itself. That fails where the
    tokenizer does not know its sample text, as of words or characters, and gives the first word of
    an output a blank that the decoded text does not have.

    Args:
        strings: Text that ends an output; it stays part of it.
        tokenizer: Tokenizer of the outputs.
    """

    def __init__(self, strings: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings = strings
        self.tokenizer = tokenizer
        names = ("pad", "bos", "eos")
        self.no_text = {getattr(tokenizer, f"{name}_token_id", None) for name in names}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which outputs end, `[B]`, of ids `[B, T]`."""
        ended = [self._ends(row) for row in input_ids.tolist()]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        before, text = self._text(ids[:-1]), self._text(ids)
        # Bytes of a character that was incomplete may have changed the end of the text.
        old = len(os.path.commonprefix([before, text]))  # noqa: RUF071
        return any(
            (found := text.rfind(string)) >= 0 and found + len(string) > old
            for string in self.strings
        )

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode([token for token in ids if token not in self.no_text])
        return text


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate` and its methods, with corrections for caches and masks of an encoder-decoder."""

    def _prepare_generation_config(
        self,
        generation_config: GenerationConfig | None,
        use_transformers_search: bool | None = None,
        **kwargs: Any,
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """As in Transformers, plus `use_transformers_search`: True never runs the fast search.

        A call with `max_new_tokens` replaces the model's own `max_length` without the warning that
        is meant for calls with both.
        """
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if config.bad_words_ids:
            # Words that a call bans replace those of the model, among them <pad> and <s>.
            own = [word for word in self.generation_config.bad_words_ids or [] if len(word) == 1]
            banned = config.bad_words_ids
            config.bad_words_ids = [*banned, *(word for word in own if word not in banned)]
        # In chunks, an encoder-decoder's prompt would be read with parts of the source's mask.
        config.prefill_chunk_size = None
        if use_transformers_search is not None:
            config.use_transformers_search = use_transformers_search
        max_length = kwargs.get("max_length", getattr(generation_config, "max_length", None))
        if config.max_new_tokens is not None and max_length is None:
            config.max_length = None
        return config, model_kwargs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in Transformers, but no position enters a filled cache twice.

        Transformers' `_prefill` removes cached positions from a target only if it has a mask, but
        targets have none here. An assistant's cache would be corrupt after its first call.

        Args:
            input_ids: Targets so far, `[B, T]`.
            next_sequence_length: Number of last positions to feed; None: all new ones.
            past_key_values: May hold positions of an earlier call.
            kwargs: As Transformers takes them.
        """
        has_mask = kwargs.get("decoder_attention_mask") is not None
        if past_key_values is not None and next_sequence_length is None and not has_mask:
            unseen = input_ids.shape[1] - int(past_key_values.get_seq_length())
            next_sequence_length = unseen if unseen > 0 else None
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, past_key_values, **kwargs
        )
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """Leaves the mask for a static cache to the decoder.

        The decoder knows which kernel will run (eager if attention weights are requested), and
        counts positions by the mask `[B, past + T]`, which one of `[B, 1, T, K]` would replace.

        Args:
            attention_mask: 1 = real target token, `[B, past + T]`.
            kwargs: Further arguments of Transformers' method; unused.
        """
        return attention_mask

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in Transformers, with the target's vocabulary instead of the source's.

        Args:
            args: Arguments of Transformers' method.
            kwargs: Further ones, by name.
        """
        writer = self._with_written_vocabulary()
        scores: Tensor = GenerationMixin.compute_transition_scores(writer, *args, **kwargs)
        return scores

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """As in Transformers, with the target's vocabulary instead of the source's.

        Raises:
            ValueError: If the source's ids are to change the scores of another vocabulary.
        """
        size = self.config.decoder_vocab_size
        is_shared = self.config.share_encoder_decoder_embeddings
        neutral = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
        for name, without_effect in neutral.items():
            value = getattr(generation_config, name)
            if size is not None and not is_shared and value not in (None, without_effect):
                raise ValueError(
                    f"`{name}` takes the source's ids for the target's, so both must have one "
                    f"vocabulary, got {value} for a model with two (`decoder_vocab_size={size}`). "
                    "Leave it out."
                )
        writer = self._with_written_vocabulary()
        return GenerationMixin._get_logits_processor(writer, generation_config, *args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, with the target's vocabulary instead of the source's."""
        writer = self._with_written_vocabulary()
        return GenerationMixin._get_candidate_generator(writer, *args, **kwargs)

    def _with_written_vocabulary(self) -> "VanillaTransformerGenerationMixin":
        """This model, or a shallow copy whose `vocab_size` is the target's."""
        if self.config.target_vocab_size == self.config.vocab_size:
            return self
        writer = copy.copy(self)
        writer.config = copy.copy(self.config)
        writer.config.vocab_size = self.config.target_vocab_size
        return writer

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
    ) -> None:
        """As in Transformers; the decoder itself makes a plain dynamic cache, if it runs.

        Raises:
            ValueError: If a static cache is asked for, and values have not as many heads as keys.
        """
        implementation = generation_config.cache_implementation
        shapes = self.config.head_shapes(self.config.decoder_attention_heads)
        keys, values = shapes.key.heads, shapes.value.heads
        if "static" in (implementation or "") and keys != values:
            raise ValueError(
                "A static cache needs as many heads of values as of keys, got "
                f"{values} (`value_heads`) and {keys} (`key_heads`) for `cache_implementation="
                f"{implementation!r}`. Leave it out."
            )
        if (
            implementation not in (None, "dynamic")
            or model_kwargs.get("past_key_values") is not None
            or generation_config.is_assistant
            or generation_mode == GenerationMode.ASSISTED_GENERATION
        ):
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, *args
            )

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, which will call only the encoder.

        FSDP2 collects what belongs to no layer, such as the norm after the last one, in the model's
        own `forward` only.
        """
        if hasattr(type(self), "unshard"):
            self.unshard()
        return super()._prepare_model_inputs(*args, **kwargs)

    def _reorder_cache(
        self, past_key_values: EncoderDecoderCache, beam_idx: Tensor
    ) -> EncoderDecoderCache:
        """Reorders the targets' keys and values with their beams; sources are not copied.

        Beam search calls it after each step. Beams move within their sentence only.
        """
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def _get_stopping_criteria(
        self,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> StoppingCriteriaList:
        strings = generation_config.stop_strings
        if strings and tokenizer:
            generation_config = copy.copy(generation_config)
            generation_config.stop_strings = None
        criteria = super()._get_stopping_criteria(generation_config, stopping_criteria, tokenizer)
        if strings and tokenizer:
            strings = [strings] if isinstance(strings, str) else list(strings)
            criteria.append(StopStrings(strings, tokenizer))
        return criteria

    def _sample(self, *arguments: Any, **inputs: Any) -> Any:
        """Greedy search and sampling: the fast search, or Transformers' search."""
        outputs = self.model.computing.search(self, *arguments, **inputs)
        return super()._sample(*arguments, **inputs) if outputs is None else outputs

    def _beam_search(self, *arguments: Any, **inputs: Any) -> Any:
        """Beam search: the fast search, or Transformers' search."""
        outputs = self.model.computing.search(self, *arguments, **inputs)
        if outputs is not None:
            return outputs
        # Older releases take the vocabulary's size from the config.
        return GenerationMixin._beam_search(self._with_written_vocabulary(), *arguments, **inputs)


def causal_mask(
    config: VanillaTransformerConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
) -> Any:
    """Mask of the decoder's self-attention, in the form of the config's kernel.

    Without it, flash and flex attention would attend to the unused end of a static cache.

    Args:
        config: From `attention_config`.
        inputs_embeds: `[B, T, D]`.
        attention_mask: 1 = real token, `[B, past + T]`; None: all are.
        cache: Of the self-attention.
    """
    if cache is None or not cache.is_compileable:
        return create_causal_mask(config, inputs_embeds, attention_mask, cache)
    past_length = cache.get_seq_length()
    if attention_mask is None and is_flash_attention_requested(config):
        # Without a mask, flash kernels also attend to the unused end of the cache.
        size = (len(inputs_embeds), int(past_length) + inputs_embeds.shape[1])
        attention_mask = inputs_embeds.new_ones(size)
    mask = create_causal_mask(config, inputs_embeds, attention_mask, cache)
    if config._attn_implementation == "flex_attention" and isinstance(past_length, Tensor):
        # A flex mask reads the past length when kernels run, and the cache increments its length in
        # place. So the cache gets a copy.
        cache.layers[0].cumulative_length = past_length.clone()
    return mask
