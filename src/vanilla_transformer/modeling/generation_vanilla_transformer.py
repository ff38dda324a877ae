"""What `generate` does otherwise than Transformers' own: its caches, its masks and its searches."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import (
    EosTokenCriteria,
    ForcedBOSTokenLogitsProcessor,
    GenerationMixin,
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

from .decoding_vanilla_transformer import IncrementalDecoder
from .packing_vanilla_transformer import VARLEN
from .search_vanilla_transformer import (
    BeamSettings,
    Constraints,
    beam_search,
    greedy_search,
    padded,
)

# Releases whose searches ours were compared with, the second excluded.
TESTED_RELEASES = ((5, 17), (5, 24))
# Those that look at nothing but the row that they are given, so that rows may leave the batch.
ROWWISE_PROCESSORS = (
    ForcedBOSTokenLogitsProcessor,
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
    """Ends each sentence at a limit of its own, whatever batch it is in.

    Args:
        limits: Longest output of each sentence in tokens, start token not counted, `[B]`.
    """

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each of the B * beams hypotheses `[B * beams, T]` has reached its limit."""
        beams = len(input_ids) // len(self.limits)
        return input_ids.shape[1] - 1 >= self.limits.repeat_interleave(beams)


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate` and its methods, with corrections for caches and masks of an encoder-decoder."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in Transformers, but no position goes twice into a cache that came filled.

        Transformers' `_prefill` cuts what the cache holds off a target only if it has a mask, which
        targets do without. An assistant would draft from a garbled cache after its first call.

        Args:
            input_ids: Targets so far, `[B, T]`.
            next_sequence_length: Positions to feed, the last ones; None: all that are new.
            past_key_values: Holds positions of an earlier call, or none.
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

        The decoder knows which kernel will run, eager where attention weights are asked for, and
        counts positions by the mask `[B, past + T]` that a ready one `[B, 1, T, K]` replaces.

        Args:
            attention_mask: 1 = real target token, `[B, past + T]`.
            kwargs: What else Transformers makes such masks from.
        """
        return attention_mask

    def compute_transition_scores(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in Transformers, which takes the source's vocabulary for the one that is written.

        Args:
            args: Of Transformers' own.
            kwargs: Of Transformers' own.
        """
        writer = self._with_written_vocabulary()
        scores: Tensor = GenerationMixin.compute_transition_scores(writer, *args, **kwargs)
        return scores

    def _with_written_vocabulary(self) -> "VanillaTransformerGenerationMixin":
        """This model, or a view of it whose `vocab_size` is that of what it writes."""
        if self.config.target_vocab_size == self.config.vocab_size:
            return self
        writer = copy.copy(self)
        writer.config = copy.copy(self.config)
        writer.config.vocab_size = self.config.target_vocab_size
        return writer

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        """As in Transformers, which copies the config twice for the one cache that needs nothing.

        Args:
            generation_config: Of `generate`.
            model_kwargs: Inputs of the model; the cache goes in here.
            args: What Transformers makes other caches from.
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
        """Transformers' static caches have as many heads of values as of keys.

        Raises:
            ValueError: If the model has not.
        """
        shapes = self.config.head_shapes(self.config.decoder_attention_heads)
        keys, values = shapes.key.heads, shapes.value.heads
        if implementation is not None and "static" in implementation and keys != values:
            raise ValueError(
                "A static cache needs as many heads of values as of keys, got "
                f"{values} (`value_heads`) and {keys} (`key_heads`) for `cache_implementation="
                f"{implementation!r}`. Leave it out."
            )

    def _reorder_cache(
        self, past_key_values: EncoderDecoderCache, beam_idx: Tensor
    ) -> EncoderDecoderCache:
        """Moves the targets' keys and values with their beams, and copies no source.

        Beam search calls it after each step, and beams change places within their sentence only.

        Args:
            past_key_values: Of all beams.
            beam_idx: Row that each row goes on from, `[B]`.
        """
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        """Greedy search and sampling, by the search of this package where it knows the settings."""
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        arguments = self._search_arguments(*given, 1, **kwargs)
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
        """Beam search, by the search of this package where it knows the settings."""
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        settings = BeamSettings(
            generation_config.num_beams,
            generation_config.length_penalty,
            generation_config.early_stopping,
            generation_config.max_length - input_ids.shape[1],
        )
        arguments = None
        if not (generation_config.do_sample or generation_config.low_memory):
            arguments = self._search_arguments(*given, settings.num_beams, **kwargs)
        if arguments is None:
            # Older releases take the vocabulary's size from the config.
            return GenerationMixin._beam_search(self._with_written_vocabulary(), *given, **kwargs)
        wanted = generation_config.num_return_sequences
        found = beam_search(*arguments, settings)
        outputs = [tokens for hypotheses in found for _, tokens in hypotheses[:wanted]]
        # Transformers fills up with padding only if its id is not 0.
        fill = generation_config._pad_token_tensor or generation_config._eos_token_tensor[0]
        return _join(input_ids[:: settings.num_beams].repeat_interleave(wanted, 0), outputs, fill)

    def _search_arguments(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        beams: int,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> tuple[IncrementalDecoder, Tensor, list[int], set[int], Constraints] | None:
        """What the searches of this package take, None where Transformers' own has to run.

        Args:
            input_ids: Prompts, one for each hypothesis, `[B * beams, P]`.
            logits_processor: Of `generate`.
            stopping_criteria: Of `generate`.
            generation_config: Of `generate`.
            beams: Hypotheses of a sentence.
            synced_gpus: Other processes wait for as many calls of `forward` as here.
            streamer: Wants each token as it comes.
            model_kwargs: Inputs of the model; anything beyond the usual ones is left to it.
        """
        cache = model_kwargs.pop("past_key_values", None)
        encoder_outputs = model_kwargs.pop("encoder_outputs")
        attention_mask = model_kwargs.pop("attention_mask", None)
        unusual = {name for name, value in model_kwargs.items() if value is not None}
        stops = _stops(stopping_criteria, input_ids.shape[1], len(input_ids) // beams)
        if (
            stops is None
            or synced_gpus
            or streamer is not None
            or generation_config.return_dict_in_generate
            or generation_config.prefill_chunk_size is not None
            or generation_config.is_assistant
            or not model_kwargs["use_cache"]
            or unusual - {"use_cache", "logits_to_keep"}
            or not _is_own_dynamic_cache(cache)
            or not all(type(processor) in ROWWISE_PROCESSORS for processor in logits_processor)
            or not self._runs_as_written()
        ):
            return None
        limits, end_tokens = stops
        constraints = Constraints(logits_processor)
        candidates = BeamSettings(beams).candidates(end_tokens)
        if self.config.target_vocab_size < candidates + len(constraints.banned):
            # Transformers then goes on with hypotheses that cannot be.
            return None
        if attention_mask is not None:
            attention_mask = attention_mask[::beams]
        decoding = IncrementalDecoder(self, encoder_outputs[0][::beams], attention_mask)
        return decoding, input_ids[::beams], limits, end_tokens, constraints

    def _runs_as_written(self) -> bool:
        """Whether nothing stands between `generate` and the layers that our search would pass by.

        Such as hooks, a `forward` of somebody's, a compiled one, autocast, or kernels with masks of
        their own; nor is the release of Transformers one that was never tested.
        """
        stages = (self, self.model, self.model.decoder)
        owner = next(kind for kind in type(self).__mro__ if "forward" in vars(kind))
        release = tuple(int(part) for part in transformers_version.split(".")[:2])
        return (
            not self.training
            and VanillaTransformerGenerationMixin in owner.__bases__
            and self.config._attn_implementation in ("eager", "sdpa", VARLEN)
            and not any(
                "forward" in vars(stage)
                or stage._forward_hooks
                or stage._forward_pre_hooks
                or stage._compiled_call_impl is not None
                for stage in stages
            )
            and TESTED_RELEASES[0] <= release < TESTED_RELEASES[1]
            # Last: weights that rest on a disk have no device that could tell, but hooks.
            and not torch.is_autocast_enabled(self.device.type)
        )


def _stops(
    stopping_criteria: StoppingCriteriaList, prompt_length: int, sentences: int
) -> tuple[list[int], set[int]] | None:
    """Longest output of each sentence behind its prompt and what ends one; None: something else."""
    limits = torch.full((sentences,), torch.iinfo(torch.long).max)
    end_tokens: set[int] = set()
    for criterion in stopping_criteria:
        if type(criterion) is MaxLengthCriteria:
            limits = limits.clamp(max=criterion.max_length - prompt_length)
        elif isinstance(criterion, SourceLengthLimit):
            limits = limits.minimum(criterion.limits.cpu() + 1 - prompt_length)
        elif type(criterion) is EosTokenCriteria:
            end_tokens.update(criterion.eos_token_id.tolist())
        else:
            return None
    # Without an end token Transformers goes on behind the limits of single sentences.
    return (limits.tolist(), end_tokens) if end_tokens else None


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
    """Outputs behind their prompts, filled up to one length, `[B, T]`."""
    rows, _ = padded(outputs, int(fill))
    return torch.cat((prompt, rows.to(prompt.device)), dim=-1)
