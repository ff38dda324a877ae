"""The loss, section 5.4, with label smoothing and R-Drop.

Shapes: B batch · T target · D `d_model` · V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Label of a position without a target.
IGNORED = -100


class LossTerms(NamedTuple):
    """Terms of a training loss besides the likelihood of the targets.

    Attributes:
        label_smoothing: Probability mass spread over all ids, section 5.4.
        r_drop_alpha: Weight of R-Drop's `divergence_sum`; 0 for a single pass.
    """

    label_smoothing: float = 0.0
    r_drop_alpha: float = 0.0


LIKELIHOOD = LossTerms()


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Label-smoothed cross-entropy (section 5.4), summed over the real targets.

    Smoothing is uniform over all V ids, as in torch; the sum is taken in float32 or wider.

    Args:
        logits: `[..., V]`.
        labels: `[...]`, -100 at positions without a target.
        label_smoothing: Probability mass spread over all ids.
    """
    return F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def divergence_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """R-Drop's divergence of two passes with dropout, summed over the real targets.

    (KL(p, q) + KL(q, p)) / 2 (Wu et al. 2021, arXiv 2106.14448, equation 2), where p and q are the
    softmaxes of the two halves, in float32 or wider.

    Args:
        logits: `[2 B, ..., V]`, the first pass before the second.
        labels: `[2 B, ...]`, the same twice; -100 at positions without a target.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p, log_q = wide.log_softmax(-1).chunk(2)
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    return divergence.where(labels.chunk(2)[0] != IGNORED, 0.0).sum()


def loss_sum(logits: Tensor, labels: Tensor, terms: LossTerms = LIKELIHOOD) -> Tensor:
    """`cross_entropy_sum`, plus the weighted `divergence_sum` if its weight is not 0."""
    total = cross_entropy_sum(logits, labels, terms.label_smoothing)
    if terms.r_drop_alpha:
        total = total + terms.r_drop_alpha * divergence_sum(logits, labels)
    return total
