"""R-Drop (Wu et al. 2021, arXiv 2106.14448): two passes under dropout should agree."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput


def r_drop(
    model: Callable[..., Seq2SeqLMOutput],
    alpha: float,
    *,
    num_items_in_batch: int | Tensor | None = None,
    **inputs: Tensor,
) -> Seq2SeqLMOutput:
    """Calls a model once on a batch that holds every pair twice, with a loss on their difference.

    The loss is the mean of both cross-entropies plus alpha / 2 times the symmetric
    Kullback-Leibler divergence (KL(p, q) + KL(q, p)) / 2, per target token. That is half the loss
    of the paper's equation (4), which keeps it comparable with the loss of a single pass.

    Args:
        model: A vanilla Transformer in training mode, wrapped or not.
        alpha: Weight of the divergence; the paper uses 5 for translation.
        num_items_in_batch: Divisor of the summed loss, each target counted once; None for the
            targets of this batch.
        inputs: Tensors of the batch, `[B, ...]` each, including `labels`.

    Returns:
        The model's output for 2 B rows, the second pass after the first, with this loss.
    """
    return model(
        **{name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()},
        num_items_in_batch=None if num_items_in_batch is None else 2 * num_items_in_batch,
        r_drop_alpha=alpha,
    )
