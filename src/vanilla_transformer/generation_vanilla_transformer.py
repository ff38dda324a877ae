"""What `generate` needs of an encoder-decoder besides Transformers' own code, by public doors."""

import copy
from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation import GenerationMixin, StoppingCriteriaList
from transformers.modeling_outputs import Seq2SeqLMOutput

# The name of the cache in outputs and in Transformers' own code: "past_key_values" before release
# 5.24, "cache" since. Calls of this model may use either.
CACHE = next(
    field.name for field in fields(Seq2SeqLMOutput) if field.name in ("cache", "past_key_values")
)
# Settings of `generate`, which it takes as arguments or in a `GenerationConfig`.
SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate` and its methods, with corrections for caches and masks of an encoder-decoder."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        *,
        use_transformers_search: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in Transformers; where it finds the same, the search of the package runs.

        Tokens that the model never writes stay banned if the call bans others. A call with
        `max_new_tokens` replaces the model's own `max_length`.

        Args:
            inputs: Source tokens `[B, S]`.
            generation_config: Settings of this call; others are the model's own.
            logits_processor: Further processors of scores.
            stopping_criteria: Further criteria that end outputs.
            use_transformers_search: Never runs the search of the package.
            kwargs: Settings and inputs; `stop_strings` need the letters a to f in the vocabulary.

        Raises:
            ValueError: If a setting does not suit two vocabularies, or an encoder-decoder.
        """
        # A setting that is None is the model's own.
        given = {} if generation_config is None else vars(generation_config)
        kwargs = {k: x for k, x in given.items() if k in SETTINGS and x is not None} | kwargs
        for config in (generation_config, self.generation_config):
            if use_transformers_search is None:
                use_transformers_search = getattr(config, "use_transformers_search", None)
        if (cache := kwargs.pop("past_key_values", None)) is None:
            cache = kwargs.pop("cache", None)
        if cache is not None:
            kwargs[CACHE] = cache
        self._refuse(kwargs)
        self._correct(kwargs)
        if hasattr(type(self), "unshard"):
            # FSDP2 collects what belongs to no layer in the model's own `forward` only, and
            # `generate` calls the encoder first.
            self.unshard()
        return self.model.backend.generate(
            self._with_written_vocabulary(),
            inputs=inputs,
            logits_processor=logits_processor,
            stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
            use_transformers_search=use_transformers_search,
            **kwargs,
        )

    def _correct(self, kwargs: dict[str, Any]) -> None:
        """Changes the settings of a call to what they mean."""
        if banned := kwargs.get("bad_words_ids"):
            # Words that a call bans replace those of the model, among them <pad> and <s>.
            own = [word for word in self.generation_config.bad_words_ids or [] if len(word) == 1]
            kwargs["bad_words_ids"] = [*banned, *(word for word in own if word not in banned)]
        if kwargs.get("max_new_tokens") is not None:
            # Without it, Transformers warns of two limits, of which one is the model's own.
            kwargs.setdefault("max_length", None)

    def _refuse(self, kwargs: dict[str, Any]) -> None:
        """Refuses prompts in chunks, and penalties by source ids where targets have other ones."""
        if size := kwargs.get("prefill_chunk_size", self.generation_config.prefill_chunk_size):
            raise ValueError(
                f"`prefill_chunk_size` would cut off source masks, got {size}: leave it out."
            )
        config = self.config
        if not config.decoder_vocab_size or config.share_encoder_decoder_embeddings:
            return
        neutral = {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}
        for name, without_effect in neutral.items():
            value = kwargs.get(name, getattr(self.generation_config, name, None))
            if value not in (None, without_effect):
                raise ValueError(
                    f"`{name}` takes the source's ids for the target's, so both must have one "
                    f"vocabulary, got {value} for a model with two (`decoder_vocab_size="
                    f"{config.decoder_vocab_size}`). Leave it out."
                )

    def _with_written_vocabulary(self) -> "VanillaTransformerGenerationMixin":
        """This model, or a shallow copy whose `vocab_size` is the target's."""
        if self.config.target_vocab_size == self.config.vocab_size:
            return self
        writer = copy.copy(self)
        writer.config = copy.copy(self.config)
        writer.config.vocab_size = self.config.target_vocab_size
        return writer

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """As in Transformers, but no position enters a filled cache twice.

        Transformers removes cached positions from a target only if it has a mask, but targets have
        none here. An assistant's cache would be corrupt after its first call.
        """
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        has_mask = kwargs.get("decoder_attention_mask") is not None
        if cache is not None and kwargs.get("next_sequence_length") is None and not has_mask:
            unseen = input_ids.shape[1] - int(cache.get_seq_length())
            if unseen > 0:
                kwargs["next_sequence_length"] = unseen
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """Leaves the mask for a static cache to the decoder.

        The decoder knows which kernel will run (eager if attention weights are requested), and
        counts positions by the mask `[B, past + T]`, which one of `[B, 1, T, K]` would replace.
        """
        return attention_mask

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in Transformers, with the target's vocabulary instead of the source's."""
        writer = self._with_written_vocabulary()
        scores: Tensor = GenerationMixin.compute_transition_scores(writer, *args, **kwargs)
        return scores

    def _reorder_cache(self, cache: EncoderDecoderCache, beam_idx: Tensor) -> EncoderDecoderCache:
        """Reorders the targets' keys and values with their beams; sources are not copied.

        Transformers' beam search calls it after each step, if it is there: a release that no longer
        does copies the sources too. Beams move within their sentence only.
        """
        cache.self_attention_cache.reorder_cache(beam_idx)
        return cache
