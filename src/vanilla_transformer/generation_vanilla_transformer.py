"""What `generate` does otherwise than Transformers' own: its caches and its masks."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationMixin


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
