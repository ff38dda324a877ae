"""Layers without padding: the real tokens of a batch lie end to end.

`attn_implementation="varlen"` selects it. After the embeddings, dropout and all maps of single
tokens run over real tokens only. Attention runs torch's kernel for sequences of various lengths, on
a GPU in half precision, or else torch's usual one, for which only queries, keys and values are
padded again. No result changes.

Shapes: B batch · Q, K query and key positions · N real tokens of a batch · H heads · E head size.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .loss_vanilla_transformer import IGNORED

VARLEN = "varlen"


class Packing:
    """Where each real token of a padded batch is when all are joined end to end.

    A GPU is waited for once, for the number of tokens.

    Args:
        attention_mask: 1 = real token, `[B, Q]`.
        slots: Indices of the real tokens in the flattened mask, `[N]`; None: they are looked for.

    Attributes:
        is_real: Whether a token is real, `[B, Q]`.
        starts: Index of each sentence's first token, and the number of all tokens, `[B + 1]`.
        width: Number of positions Q, which no sentence exceeds.
        count: Number of real tokens N.
    """

    def __init__(self, attention_mask: Tensor, slots: Tensor | None = None) -> None:
        self.is_real = attention_mask.bool()
        self.starts = F.pad(self.is_real.sum(-1).cumsum(0), (1, 0)).int()
        self.width = self.is_real.shape[1]
        self._slots = self.is_real.flatten().nonzero().squeeze(1) if slots is None else slots
        self.count = len(self._slots)

    def pack(self, x: Tensor) -> Tensor:
        """Leaves padding out, `[B, Q, ...]` -> `[1, N, ...]`."""
        # Not a view, which would have the first of the compiled layers compiled apart.
        return x.flatten(0, 1)[None].index_select(1, self._slots)

    def unpack(self, x: Tensor) -> Tensor:
        """Puts zeros where padding was, `[1, N, ...]` -> `[B, Q, ...]`."""
        padded = x.new_zeros(self.is_real.numel(), *x.shape[2:])
        return padded.index_copy(0, self._slots, x[0]).unflatten(0, self.is_real.shape)

    @cached_property
    def aligned(self) -> "Packing":
        """The same tokens with all padding on the right."""
        positions = torch.arange(self.width, device=self.starts.device)
        lengths = self.starts.diff()
        # How much further a sentence begins in the padded batch than among the real tokens.
        gaps = torch.arange(len(lengths), device=lengths.device) * self.width - self.starts[:-1]
        slots = gaps.repeat_interleave(lengths, output_size=self.count)
        slots += torch.arange(self.count, device=lengths.device)
        return Packing(positions < lengths[:, None], slots)


class PackedMask(NamedTuple):
    """Replaces a mask: which queries and keys belong to one sentence, or to one pair."""

    queries: Packing
    keys: Packing

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        """Attention within each sentence or pair, equation (1).

        Args:
            module: The attention module, which has `is_causal`.
            query: `[1, H, N, E]`.
            key: `[1, H, N, E]`, with the N of the keys.
            value: `[1, H, N, E]`, likewise.
            scaling: 1 / sqrt(d_k).
            dropout: Rate on the attention weights.

        Returns:
            The heads' outputs, `[1, N, H, E]`.
        """
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        sizes = (query.shape[-1], value.shape[-1])
        if _fits_kernel(query.device, query.dtype, *sizes, dropout):
            heads: Any = varlen_attn(
                query[0],
                key[0],
                value[0],
                self.queries.starts,
                self.keys.starts,
                self.queries.width,
                self.keys.width,
                scale=scaling,
                # Number of keys to the left and to the right of a token's own position; -1: all.
                window_size=(-1, 0) if module.is_causal else (-1, -1),
            )
            return heads[None]
        queries, keys = self.queries.aligned, self.keys.aligned
        padded = [
            packing.unpack(x).transpose(1, 2)
            for packing, x in ((queries, query), (keys, key), (keys, value))
        ]
        # With a causal mask no query sees the padding on its right.
        mask = None if module.is_causal else keys.is_real[:, None, None]
        heads, _ = sdpa_attention_forward(module, *padded, mask, dropout, scaling)
        return queries.pack(heads)


def _fits_kernel(
    device: torch.device, dtype: torch.dtype, key_size: int, value_size: int, dropout: float
) -> bool:
    """Whether torch's kernel for various lengths supports these heads; it has no dropout."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and key_size == value_size
        and key_size % 8 == 0
        and key_size <= 256
        and dropout == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def packings(
    config: VanillaTransformerConfig, *attention_masks: Tensor | Packing | None, **kwargs: Any
) -> list[Packing]:
    """The packing of each mask; an empty list if batches keep their padding.

    They keep it if another kernel runs, if a mask is missing or has no real token, if hidden states
    are requested, whose shape would change, and under `torch.compile`, where shapes must not depend
    on the data.

    Args:
        config: From `attention_config`.
        attention_masks: 1 = real token, `[B, Q]` each; None: all are. Or packings of such masks.
        kwargs: Of the stack's call.
    """
    known = [
        mask
        for mask in attention_masks
        if isinstance(mask, Packing) or (mask is not None and mask.dim() == 2)
    ]
    if (
        config._attn_implementation != VARLEN
        or len(known) < len(attention_masks)
        or kwargs.get("output_hidden_states", config.output_hidden_states)
        or torch.compiler.is_compiling()
    ):
        return []
    found = [mask if isinstance(mask, Packing) else Packing(mask) for mask in known]
    for packing in found:
        # Compiled layers would be compiled again if the first one stored it.
        packing.aligned  # noqa: B018
    return found if all(packing.count for packing in found) else []


def up_to_last_target(labels: Tensor) -> Tensor:
    """Mask `[B, T]` of the target positions that any loss of `labels` `[B, T]` depends on."""
    return (labels != IGNORED).flip(-1).cumsum(-1).flip(-1) > 0


def varlen_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The kernel in Transformers' registry: attends by a `PackedMask`, or as `sdpa` if padded.

    Returns:
        The heads' outputs `[B, Q, H, E]`, and no weights.
    """
    # The mask's own method, because the code of a model from the Hub has its own classes.
    if isinstance(attention_mask, tuple):
        return attention_mask.attend(module, query, key, value, scaling, dropout), None
    arguments = (module, query, key, value, attention_mask, dropout, scaling)
    return sdpa_attention_forward(*arguments, **kwargs)


AttentionInterface.register(VARLEN, varlen_attention_forward)
AttentionMaskInterface.register(VARLEN, sdpa_mask)
