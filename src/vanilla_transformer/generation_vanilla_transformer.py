"""How `generate` differs from Transformers' own: its caches, masks and searches."""

import copy
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import (
    EosTokenCriteria,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationMixin,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from .cpu_vanilla_transformer import WeightLayouts
from .decoding_vanilla_transformer import IncrementalDecoder
from .packing_vanilla_transformer import VARLEN
from .search_vanilla_transformer import (
    BeamSettings,
    Constraints,
    beam_search,
    greedy_search,
    padded,
)
from .shortcuts_vanilla_transformer import is_hooked, is_ours, is_sharded, is_untouched
from .stop_strings_vanilla_transformer import StopStrings

logger = logging.get_logger(__name__)

# Our searches were compared with those of these releases, the second excluded.
TESTED_RELEASES = ((5, 17), (5, 24))
# These look at single rows only, so rows may leave the batch.
ROWWISE_PROCESSORS = (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


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


# Criteria that this package's searches apply without calling them.
KNOWN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, SourceLengthLimit)


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate` and its methods, with corrections for caches and masks of an encoder-decoder."""

    @cached_property
    def weight_layouts(self) -> WeightLayouts:
        """This model's weights as decoding step by step lays them out on a CPU."""
        return WeightLayouts()

    def _prepare_generation_config(
        self,
        generation_config: GenerationConfig | None,
        use_transformers_search: bool | None = None,
        **kwargs: Any,
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """As in Transformers, plus `use_transformers_search`.

        A call with `max_new_tokens` replaces the model's own `max_length` without the warning that
        is meant for calls with both.

        Args:
            generation_config: As Transformers takes it.
            use_transformers_search: True: never runs this package's search; None: as in the
                generation config.
            kwargs: As Transformers takes them.
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
            kwargs: Of Transformers' own; unused.
        """
        return attention_mask

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in Transformers, with the target's vocabulary instead of the source's.

        Args:
            args: Of Transformers' own.
            kwargs: Of Transformers' own.
        """
        writer = self._with_written_vocabulary()
        scores: Tensor = GenerationMixin.compute_transition_scores(writer, *args, **kwargs)
        return scores

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """As in Transformers, with the target's vocabulary instead of the source's.

        Args:
            generation_config: Settings of `generate`.
            args: Further arguments of Transformers' method.
            kwargs: Likewise, by name.

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
        """As in Transformers, with the target's vocabulary instead of the source's.

        Args:
            args: Arguments of Transformers' method.
            kwargs: Likewise, by name.
        """
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
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """As in Transformers, which copies the config twice for a plain dynamic cache.

        Args:
            generation_config: Of `generate`.
            model_kwargs: Inputs of the model; the cache is added.
            args: Of Transformers' own, for other caches.
        """
        if (
            generation_config.cache_implementation is None
            and generation_config.use_cache
            and not generation_config.is_assistant
            and model_kwargs.get("past_key_values") is None
        ):
            caches = (DynamicCache(), DynamicCache())
            model_kwargs["past_key_values"] = EncoderDecoderCache(*caches)
        else:
            self._refuse_cache(generation_config.cache_implementation)
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    def _refuse_cache(self, implementation: str | None) -> None:
        """Refuses static caches for models with more or fewer heads of values than of keys.

        Raises:
            ValueError: If the model is one.
        """
        shapes = self.config.head_shapes(self.config.decoder_attention_heads)
        keys, values = shapes.key.heads, shapes.value.heads
        if implementation is not None and "static" in implementation and keys != values:
            raise ValueError(
                "A static cache needs as many heads of values as of keys, got "
                f"{values} (`value_heads`) and {keys} (`key_heads`) for `cache_implementation="
                f"{implementation!r}`. Leave it out."
            )

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, which will call the encoder alone.

        FSDP2 collects what belongs to no layer, such as the norm after the last one, in the model's
        own `forward` only.

        Args:
            args: Of Transformers' own.
            kwargs: Of Transformers' own.
        """
        if is_sharded(self):
            self.unshard()
        return super()._prepare_model_inputs(*args, **kwargs)

    def _reorder_cache(
        self, past_key_values: EncoderDecoderCache, beam_idx: Tensor
    ) -> EncoderDecoderCache:
        """Reorders the targets' keys and values with their beams; sources are not copied.

        Beam search calls it after each step. Beams move within their sentence only.

        Args:
            past_key_values: Of all beams.
            beam_idx: Row that each row continues, `[B]`.
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

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        """Greedy search and sampling, by this package's search if it supports the settings."""
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        arguments = self._search_arguments(*given, **kwargs)
        if arguments is None:
            return super()._sample(*given, **kwargs)
        outputs = greedy_search(*arguments, draw=_draw if generation_config.do_sample else None)
        return _join(input_ids, outputs, generation_config._pad_token_tensor)

    def _beam_search(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        """Beam search, by this package's search if it supports the settings."""
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        settings = BeamSettings(
            generation_config.num_beams,
            generation_config.length_penalty,
            generation_config.early_stopping,
            generation_config.max_length - input_ids.shape[1],
        )
        arguments = self._search_arguments(*given, **kwargs)
        if arguments is None:
            # Older releases take the vocabulary's size from the config.
            return GenerationMixin._beam_search(self._with_written_vocabulary(), *given, **kwargs)
        wanted = generation_config.num_return_sequences
        found = beam_search(*arguments, settings)
        outputs = [tokens for hypotheses in found for _, tokens in hypotheses[:wanted]]
        # Transformers pads with the padding token only if its id is not 0.
        fill = generation_config._pad_token_tensor or generation_config._eos_token_tensor[0]
        return _join(input_ids[:: settings.num_beams].repeat_interleave(wanted, 0), outputs, fill)

    def _search_arguments(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> tuple[IncrementalDecoder, Tensor, list[int], set[int], Constraints] | None:
        """Arguments of this package's searches, None if Transformers' own has to run.

        Args:
            input_ids: Prompts, one for each hypothesis, `[B * beams, P]`.
            logits_processor: Of `generate`.
            stopping_criteria: Of `generate`.
            generation_config: Of `generate`.
            kwargs: Inputs of the model and other arguments of `generate`.
        """
        given = (logits_processor, stopping_criteria, generation_config)
        reason = next(self._reasons_for_transformers_search(*given, **kwargs), None)
        if reason is not None:
            logger.debug(f"`generate` runs Transformers' search, because {reason}.")
            return None
        logger.debug("`generate` runs the search of vanilla_transformer.")
        beams = generation_config.num_beams
        hidden_states, attention_mask = kwargs["encoder_outputs"][0], kwargs.get("attention_mask")
        if attention_mask is not None:
            attention_mask = attention_mask[::beams]
        decoding = IncrementalDecoder(self, hidden_states[::beams], attention_mask)
        prompts = input_ids[::beams]
        limits = _limits(stopping_criteria, *prompts.shape)
        constraints = Constraints(logits_processor)
        return decoding, prompts, limits, _end_tokens(stopping_criteria), constraints

    def _reasons_for_transformers_search(
        self,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        past_key_values: Cache | None = None,
        encoder_outputs: Any = None,
        attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> Iterator[str]:
        """Why this package's searches do not support this call of `generate`.

        The first reason is logged; without any, this package's search runs.

        Args:
            logits_processor: Of `generate`.
            stopping_criteria: Of `generate`.
            config: Of `generate`.
            synced_gpus: Other processes wait for the same number of forward passes.
            streamer: Receives each token at once.
            past_key_values: The model's cache.
            encoder_outputs: Of the sources.
            attention_mask: Of the sources.
            inputs: Other inputs of the model.
        """
        if getattr(config, "use_transformers_search", False):
            yield "`use_transformers_search` is set"
        if config.do_sample and config.num_beams > 1:
            yield "beams are drawn (`do_sample`)"
        for name in ("low_memory", "return_dict_in_generate", "is_assistant"):
            if getattr(config, name, None):
                yield f"`{name}` is set"
        if synced_gpus:
            yield "other processes wait for the same number of forward passes (`synced_gpus`)"
        if streamer is not None:
            yield "a `streamer` wants each token as it comes"
        if not inputs["use_cache"]:
            yield "`use_cache` is False"
        if not _is_own_dynamic_cache(past_key_values):
            yield "the cache is not a new dynamic one"
        for name, value in inputs.items():
            # Seq2SeqTrainer gives `labels`; `prepare_inputs_for_generation` drops them.
            if value is not None and name not in ("use_cache", "logits_to_keep", "labels"):
                yield f"the model is given `{name}`"
        for part in (*logits_processor, *stopping_criteria):
            if type(part) not in (*ROWWISE_PROCESSORS, *KNOWN_CRITERIA):
                yield f"{type(part).__name__} is not known to look at single rows only"
        ends = _end_tokens(stopping_criteria)
        if not ends:
            # Transformers then continues beyond the limits of single sentences.
            yield "there is no end token"
        banned = Constraints(logits_processor).banned
        if self.config.target_vocab_size < len(banned) + BeamSettings(config.num_beams).candidates(
            ends
        ):
            # Transformers then continues with impossible hypotheses.
            yield "the vocabulary has fewer tokens than a step has candidates"
        yield from self._reasons_to_call_forward()

    def _reasons_to_call_forward(self) -> Iterator[str]:
        """Why a search has to call this model's `forward`."""
        decoder = self.model.decoder
        if self.training or any(module.training for module in decoder.modules()):
            # Dropout may be wanted in parts of a model in evaluation mode.
            yield "the model is in training mode"
        owner = next(kind for kind in type(self).__mro__ if "forward" in vars(kind))
        if VanillaTransformerGenerationMixin not in owner.__bases__:
            yield f"{owner.__name__} has a `forward` of its own"
        if self.config._attn_implementation not in ("eager", "sdpa", VARLEN):
            yield f"attention runs with {self.config._attn_implementation!r}"
        method = getattr(self.prepare_inputs_for_generation, "__func__", None)
        if method is not VanillaTransformerGenerationMixin.prepare_inputs_for_generation:
            # PEFT puts the prefix of prefix tuning in there.
            yield "`prepare_inputs_for_generation` is not this model's"
        # Other code may need to know which key stands where; searches put beams side by side.
        parts = [self.model, decoder, *decoder.layers]
        children = [pair for layer in decoder.layers for pair in layer.named_children()]
        parts += [child for name, child in children if name.endswith("_attn")]
        for part in parts:
            if not is_ours(part):
                yield f"{type(part).__name__} is not this package's"
        kernel = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        home = getattr(kernel, "__module__", "")
        if kernel and not home.startswith(("transformers.", __name__.rpartition(".")[0])):
            yield f"attention runs with a kernel of {home or kernel}"
        for stage in (self, self.model, decoder):
            if not is_untouched(stage):
                yield f"{type(stage).__name__} is hooked, patched or compiled"
        if any(map(is_hooked, (*decoder.modules(), self.lm_head))):
            # Hooks take rows for sentences or beams; a search of ours arranges them otherwise.
            yield "a module of the decoder is hooked"
        release = tuple(int(part) for part in transformers_version.split(".")[:2])
        if not TESTED_RELEASES[0] <= release < TESTED_RELEASES[1]:
            yield f"ours was not compared with that of Transformers {transformers_version}"
        # Last: the device of weights on a disk is unknown, but their modules are hooked.
        if torch.is_autocast_enabled(self.device.type):
            yield "autocast is enabled"


def _end_tokens(stopping_criteria: StoppingCriteriaList) -> set[int]:
    return {
        token
        for criterion in stopping_criteria
        if type(criterion) is EosTokenCriteria
        for token in criterion.eos_token_id.tolist()
    }


def _limits(
    stopping_criteria: StoppingCriteriaList, sentences: int, prompt_length: int
) -> list[int]:
    """Longest output of each sentence in tokens, prompt not counted."""
    limits = torch.full((sentences,), torch.iinfo(torch.long).max, device="cpu")
    for criterion in stopping_criteria:
        if type(criterion) is MaxLengthCriteria:
            limits = limits.clamp(max=criterion.max_length - prompt_length)
        elif type(criterion) is SourceLengthLimit:
            own = criterion.limits.cpu().repeat_interleave(sentences // len(criterion.limits))
            limits = limits.minimum(own + 1 - prompt_length)
    found: list[int] = limits.tolist()
    return found


def _is_own_dynamic_cache(cache: Cache | None) -> bool:
    return (
        isinstance(cache, EncoderDecoderCache)
        and all(
            type(half) is DynamicCache and not half.offloading
            for half in (cache.self_attention_cache, cache.cross_attention_cache)
        )
        and not getattr(cache, "_is_user_defined", False)
    )


def _draw(scores: Tensor) -> Tensor:
    """A token of each row `[B]`, as Transformers draws it."""
    return scores.softmax(-1).multinomial(1).squeeze(1)


def _join(prompt: Tensor, outputs: list[list[int]], fill: Tensor) -> Tensor:
    """Outputs after their prompts, padded to one length, `[B, T]`."""
    rows, _ = padded(outputs, int(fill))
    return torch.cat((prompt, rows.to(prompt.device)), dim=-1)
