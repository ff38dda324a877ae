"""R-Drop (Wu et al. 2021, arXiv 2106.14448): two passes under dropout should agree.

Shapes: B batch · S source · T target · V vocabulary · N real target positions of a batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import Seq2SeqLMOutput

from vanilla_transformer.loss_vanilla_transformer import CHUNK_ROWS, IGNORED


def r_drop(
    model: Callable[..., Seq2SeqLMOutput],
    alpha: float,
    *,
    labels: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    **inputs: Tensor,
) -> Seq2SeqLMOutput:
    """Calls a model once on a batch that holds every pair twice, and adds that its halves differ.

    The loss is the mean of both cross-entropies plus alpha / 2 times the symmetric
    Kullback-Leibler divergence (KL(p, q) + KL(q, p)) / 2, per target token. That is half the loss
    of the paper's equation (4), so that it stays comparable with the loss of a single pass.

    Args:
        model: A vanilla Transformer in training mode, wrapped or not.
        alpha: Weight of the divergence; the paper takes 5 for translation.
        labels: `[B, T]`, -100 where no target is.
        num_items_in_batch: What the summed loss is divided by, each target counted once; None for
            the targets of this batch.
        inputs: Tensors of the batch, `[B, ...]` each.

    Returns:
        The model's output for 2 B rows, the second pass behind the first, with this loss.
    """
    is_target = labels != IGNORED
    if num_items_in_batch is None:
        num_items_in_batch = is_target.sum()
    num_items = torch.as_tensor(num_items_in_batch, device=labels.device).clamp(min=1)
    outputs = model(
        **{name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()},
        labels=torch.cat([labels, labels]),
        num_items_in_batch=2 * num_items,
        return_logits=True,
    )
    first, second = (half[is_target] for half in outputs["logits"].chunk(2))
    divergence: Tensor = SymmetricDivergence.apply(first, second)  # type: ignore[no-untyped-call]
    outputs["loss"] = outputs["loss"] + alpha / 2 * divergence / num_items
    return outputs


class SymmetricDivergence(torch.autograd.Function):
    """(KL(p, q) + KL(q, p)) / 2 of the softmaxes p and q of two `[N, V]`, summed over the rows.

    Forward leaves the gradients, a chunk of rows at a time, as the cross-entropy does: automatic
    differentiation would keep some eight `[N, V]` for them.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        """Sums p (log p - log q) and q (log q - log p), which is (p - q) (log p - log q)."""
        wide = torch.promote_types(first.dtype, torch.float32)
        total = first.new_zeros((), dtype=wide)
        gradients = torch.empty_like(first), torch.empty_like(second)
        for start in range(0, len(first), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            log_p, log_q = (logits[rows].to(wide).log_softmax(-1) for logits in (first, second))
            p, q = log_p.exp(), log_q.exp()
            ratio, difference = log_p - log_q, p - q
            total += (difference * ratio).sum() / 2
            for gradient, share, sign in ((gradients[0], p, 1), (gradients[1], q, -1)):
                mean = (share * ratio).sum(-1, keepdim=True)
                gradient[rows] = sign * (share * (ratio - mean) + difference) / 2
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Scales the gradients that `forward` left."""
        first, second = (grad * grad_output.to(grad.dtype) for grad in ctx.saved_tensors)
        return first, second
