"""Cross-entropy of the vanilla Transformer, with logits that never all exist at once.

Shapes: B batch · T target · D `d_model` · V vocabulary · N real target positions of a batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Label of a target position that does not count.
IGNORED = -100

# Target positions whose logits [rows, V] exist at the same time.
CHUNK_ROWS = 256


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Label-smoothed cross-entropy (section 5.4), summed over the real targets.

    Smoothing is uniform over all V ids, as in torch; the sum is taken in float32 or wider.

    Args:
        logits: `[..., V]`.
        labels: `[...]`, -100 where no target is.
        label_smoothing: Share of a target's mass that is spread.
    """
    return F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def projected_cross_entropy_sum(
    lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """`cross_entropy_sum(lm_head(hidden_states), ...)` in O(`CHUNK_ROWS` * V) memory.

    Args:
        lm_head: Output projection; anything but a plain matrix (LoRA, quantised, offloaded) is
            called as it is.
        hidden_states: `[B, T, D]`.
        labels: `[B, T]`, -100 where no target is.
        label_smoothing: As above.
    """
    hidden_states, labels = hidden_states.flatten(0, 1), labels.flatten()
    if torch.compiler.is_compiling():
        # Shapes must not depend on the data: every position goes along, masked by its label.
        return _sum_by_module(lm_head, hidden_states, labels, label_smoothing)
    is_target = labels != IGNORED
    hidden_states, labels = hidden_states[is_target], labels[is_target]
    if _is_sharded(lm_head):
        # Each call would wait for all processes, and theirs need not be as many.
        lm_head.unshard()  # type: ignore[operator]
    if _is_plain_linear(lm_head):
        args = (hidden_states, lm_head.weight, lm_head.bias, labels, label_smoothing)
        total: Tensor = ProjectedCrossEntropy.apply(*args)  # type: ignore[no-untyped-call]
        return total
    return _sum_by_module(lm_head, hidden_states, labels, label_smoothing)


def _is_sharded(module: nn.Module) -> bool:
    """FSDP2 gives a module a class of its own with this method; not every torch can import it."""
    return hasattr(type(module), "unshard")


def _is_plain_linear(module: nn.Module) -> bool:
    if _is_sharded(module):
        return type(module).__bases__[1:] == (nn.Linear,)
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    # Accelerate's hooks (offload) put a `forward` of their own on the instance.
    is_hooked = any(hooks) or "forward" in vars(module)
    return type(module) is nn.Linear and not is_hooked


def _sum_by_module(
    lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, label_smoothing: float
) -> Tensor:
    """Calls the module a chunk at a time, and once more in the backward pass."""

    def chunk_sum(hidden: Tensor, label: Tensor) -> Tensor:
        return cross_entropy_sum(lm_head(hidden), label, label_smoothing)

    chunks = zip(hidden_states.split(CHUNK_ROWS), labels.split(CHUNK_ROWS), strict=True)
    sums = [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()


class ProjectedCrossEntropy(torch.autograd.Function):
    """Output projection and cross-entropy in one, a chunk of rows at a time.

    The gradient of a chunk's logits is known as soon as the logits are, so the two products of
    the backward pass run right away and no logits outlive their chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        label_smoothing: float,
    ) -> Tensor:
        """Sum of the cross-entropies of `softmax(hidden_states @ weight.T + bias)`.

        Products run in autocast's dtype, everything else in float32 or wider.

        Args:
            ctx: Carries the gradients to `backward`.
            hidden_states: `[N, D]`.
            weight: Output projection, `[V, D]`.
            bias: `[V]`, or None.
            labels: `[N]`, all real.
            label_smoothing: As in `cross_entropy_sum`.
        """
        device = hidden_states.device.type
        narrow = hidden_states.dtype
        if torch.is_autocast_enabled(device):
            narrow = torch.get_autocast_dtype(device)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        matrix = weight.to(narrow)
        total = hidden_states.new_zeros((), dtype=wide)
        grad_hidden = torch.empty_like(hidden_states) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=wide)
        # One buffer for the logits of all chunks: fresh memory costs a CPU as much as a softmax.
        buffer = matrix.new_empty(min(CHUNK_ROWS, len(labels)), len(matrix), dtype=wide)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(labels), CHUNK_ROWS):
                rows = slice(start, start + CHUNK_ROWS)
                hidden = hidden_states[rows].to(narrow)
                logits = buffer[: len(hidden)]
                if narrow == wide:
                    torch.mm(hidden, matrix.T, out=logits)
                else:
                    logits.copy_(hidden @ matrix.T)
                if bias is not None:
                    logits += bias
                loss, grad_logits = _loss_and_gradient(logits, labels[rows, None], label_smoothing)
                total += loss
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(narrow)
                if grad_hidden is not None:
                    grad_hidden[rows] = grad_logits @ matrix
                if grad_weight is None:
                    continue
                if narrow == wide:
                    grad_weight.addmm_(grad_logits.T, hidden)
                else:
                    grad_weight += grad_logits.T @ hidden
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
        )
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the gradients that `forward` left."""
        gradients = (
            None if grad is None else grad * grad_output.to(grad.dtype)
            for grad in ctx.saved_tensors
        )
        return *gradients, None, None


def _loss_and_gradient(
    logits: Tensor, label: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of `logits` `[rows, V]` and its gradient, written over them.

    With smoothing e the target is t = (1 - e) * one_hot(label) + e / V, the loss is
    logsumexp(logits) - t · logits, and its gradient is softmax(logits) - t.
    """
    target_logits = logits.gather(1, label)
    mean_logits = logits.mean(-1, keepdim=True) if label_smoothing else 0.0
    largest = logits.amax(-1, keepdim=True)
    gradient = torch.softmax(logits, -1, out=logits)
    # The largest probability is 1 / sum(exp(logits - largest)); it never underflows.
    loss = largest - gradient.amax(-1, keepdim=True).log()
    loss -= (1 - label_smoothing) * target_logits + label_smoothing * mean_logits
    if label_smoothing:
        gradient -= label_smoothing / gradient.shape[1]
    gradient.scatter_add_(1, label, gradient.new_full(label.shape, label_smoothing - 1))
    return loss.sum(), gradient
