"""Output projection and loss in one, computed in chunks of logits.

Shapes: B batch · T target · D `d_model` · V vocabulary · N real target positions of a batch ·
P passes, 2 with R-Drop and else 1.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .loss_vanilla_transformer import IGNORED, LIKELIHOOD, LossTerms, loss_sum
from .modules_vanilla_transformer import is_plain_linear, is_sharded

# Target positions whose logits [rows, V] exist at the same time on a CPU, and the most elsewhere.
CHUNK_ROWS = 256
MOST_CHUNK_ROWS = 8192
# Memory of a device is divided by this for the logits of a chunk.
CHUNK_SHARE = 32
# Of a device that does not report it.
USUAL_MEMORY = 16 * 2**30
# Chunks of a compiled loss; if it depended on the batch, each size would be compiled.
COMPILED_CHUNKS = 8

# A GPU multiplies narrow matrices fastest if their rows are multiples of 128 bytes.
ALIGNED_ENTRIES = 64
# Logit of an entry that only fills up a row. Infinity minus infinity would be no number.
FILLER_LOGIT = -1e30


def projected_loss_sum(
    lm_head: nn.Module,
    hidden_states: Tensor,
    labels: Tensor,
    terms: LossTerms = LIKELIHOOD,
    compiler: Any = None,
) -> Tensor:
    """`loss_sum(lm_head(hidden_states), ...)` in O(`CHUNK_ROWS` * V) memory.

    Compiled, it takes an eighth of the positions at a time.

    Args:
        lm_head: Output projection; anything but a plain matrix (LoRA, quantised, offloaded) is
            called, and any in float16.
        hidden_states: `[B, T, D]`; with R-Drop B is even, the first passes before the second.
        labels: `[B, T]`, -100 at positions without a target.
        terms: Terms of the loss.
        compiler: Backend of `torch.compile` for softmax, loss and gradient of a chunk; None: they
            are computed operation by operation.
    """
    # [passes, positions, ...]: a chunk takes the same positions of each pass.
    passes = 2 if terms.r_drop_alpha else 1
    hidden_states = hidden_states.flatten(0, 1).unflatten(0, (passes, -1))
    labels = labels.flatten().unflatten(0, (passes, -1))
    if torch.compiler.is_compiling():
        # Shapes must not depend on the data, so every position is projected.
        return loss_sum_by_module(lm_head, hidden_states, labels, terms)
    # Once, because a GPU's queue must run empty to count them.
    targets = (labels[0] != IGNORED).nonzero().squeeze(1)
    hidden_states, labels = (x.index_select(1, targets) for x in (hidden_states, labels))
    if is_sharded(lm_head):
        # Each call waits for all processes, and their numbers of calls may differ.
        lm_head.unshard()  # type: ignore[operator]
    # Gradients of logits are too small for float16 until the scaled loss is passed back.
    if is_plain_linear(lm_head) and factor_dtype(hidden_states) != torch.float16:
        args = (hidden_states, lm_head.weight, lm_head.bias, labels, terms, compiler)
        total: Tensor = ProjectedLoss.apply(*args)  # type: ignore[no-untyped-call]
        return total
    return loss_sum_by_module(lm_head, hidden_states, labels, terms)


def loss_sum_by_module(
    lm_head: nn.Module, hidden_states: Tensor, labels: Tensor, terms: LossTerms
) -> Tensor:
    """`loss_sum`, calling the module for a chunk at a time, and again in the backward pass.

    Hidden states are `[P, N, D]`, labels `[P, N]`. Compiled, it takes an eighth of the positions at
    a time.
    """

    def chunk_sum(hidden: Tensor, label: Tensor) -> Tensor:
        return loss_sum(lm_head(hidden), label, terms)

    # A module of an unknown kind may have any number of entries.
    entries = getattr(lm_head, "out_features", 2**16)
    count = max(1, math.ceil(labels.numel() / chunk_rows(labels.device, entries)))
    if torch.compiler.is_compiling():
        count = COMPILED_CHUNKS
    chunks = ((hidden_states[:, i::count], labels[:, i::count]) for i in range(count))
    sums = [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """Target positions of a chunk: few on a CPU, elsewhere as many as its memory allows.

    A GPU is kept waiting by small operations: 25,000 targets in chunks of 256 take some 2,000.
    """
    if device.type == "cpu":
        return CHUNK_ROWS
    memory = USUAL_MEMORY
    if device.type == "cuda" and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device).total_memory
    fitting = memory // CHUNK_SHARE // (4 * vocab_size)
    return min(max(fitting, CHUNK_ROWS), MOST_CHUNK_ROWS)


def sums_in_float32(device: torch.device) -> bool:
    """Whether products of narrow matrices can have a result in float32 (`out_dtype`)."""
    return device.type == "cuda" and torch.version.hip is None


def factor_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the factors of the loss's products: autocast's, or the dtype of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class ProjectedLoss(torch.autograd.Function):
    """Output projection and loss in one, a chunk of rows at a time.

    The gradient of a chunk's logits follows from the logits, so the two products of the backward
    pass run at once and each chunk's logits are freed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: LossTerms,
        compiler: Any,
    ) -> Tensor:
        """`loss_sum` of `hidden_states @ weight.T + bias`.

        Products run in autocast's dtype, everything else in float32 or wider.

        Args:
            ctx: Carries the gradients to `backward`.
            hidden_states: `[P, N, D]`.
            weight: Output projection, `[V, D]`.
            bias: `[V]`, or None.
            labels: `[P, N]`, all real.
            terms: Terms of the loss.
            compiler: Backend of `torch.compile` for softmax, loss and gradient; None: not compiled.
        """
        kernel = _loss_and_gradient if compiler is None else _compiled_kernel(compiler)
        ctx.settings = terms, factor_dtype(hidden_states), ctx.needs_input_grad[:3], kernel
        ctx.save_for_backward(hidden_states, weight, bias, labels)
        total, *ctx.gradients = _loss_and_gradients(
            hidden_states, weight, bias, labels, *ctx.settings
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the gradients that `forward` computed, in their own memory.

        They belong to the caller afterwards. With `retain_graph=True` a second call computes them
        again, without it autograd refuses the call.

        Raises:
            RuntimeError: If the gradients are to be differentiated in turn (`create_graph=True`).
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Second derivatives of a loss need the logits of all targets, got `create_graph="
                "True` for a loss in chunks. Call the model with `return_logits=True`."
            )
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _loss_and_gradients(*ctx.saved_tensors, *ctx.settings)[1:]
        scaled = (None if one is None else one.mul_(grad_output) for one in gradients)
        return *scaled, None, None, None


def _loss_and_gradients(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    terms: LossTerms,
    narrow: torch.dtype,
    needed: tuple[bool, bool, bool],
    kernel: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What `ProjectedLoss.forward` returns, and the `needed` gradients of its first arguments.

    The `kernel` computes what `_loss_and_gradient` does.
    """
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    has_wide_products = narrow != wide and sums_in_float32(hidden_states.device)
    product = partial(torch.mm, out_dtype=torch.float32) if has_wide_products else torch.mm
    entries = len(weight)
    matrix = _filled_up(weight, narrow) if has_wide_products else weight.to(narrow)
    total = hidden_states.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden_states) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    grad_bias = weight.new_zeros(entries, dtype=wide) if needed[2] else None
    settings = terms, entries, narrow, needed[2]
    size = _chunk_size(labels, entries)
    # One buffer for the logits of all chunks: fresh memory costs a CPU as much as a softmax.
    rows = labels[:, :size].numel()
    buffer = matrix.new_empty(rows, entries) if narrow == wide else None
    with torch.autocast(hidden_states.device.type, enabled=False):
        for start in range(0, labels.shape[1], size):
            chunk = slice(start, start + size)
            hidden = hidden_states[:, chunk].flatten(0, 1).to(narrow)
            label = labels[:, chunk]
            out = None if buffer is None else buffer[: len(hidden)]
            logits = product(hidden, matrix.T, out=out).to(wide)
            logits[:, entries:] = FILLER_LOGIT
            if bias is not None:
                logits[:, :entries] += bias
            loss, grad_logits, bias_sums = kernel(logits, label.reshape(-1, 1), *settings)
            total.add_(loss)
            if grad_bias is not None and bias_sums is not None:
                grad_bias.add_(bias_sums)
            if grad_hidden is not None:
                grad_hidden[:, chunk] = product(grad_logits, matrix).unflatten(0, label.shape)
            if grad_weight is not None and narrow == wide:
                grad_weight.addmm_(grad_logits.T, hidden)
            elif grad_weight is not None:
                grad_weight.add_(product(grad_logits.T, hidden)[:entries])
    narrowed = [x if x is None else x.to(weight.dtype) for x in (grad_weight, grad_bias)]
    return total, grad_hidden, narrowed[0], narrowed[1]


def _chunk_size(labels: Tensor, entries: int) -> int:
    """Positions of a chunk; R-Drop has two rows of logits for each."""
    passes, positions = labels.shape
    size = chunk_rows(labels.device, entries) // passes
    # Chunks of about the same size: a GPU computes a short one no faster.
    return math.ceil(positions / math.ceil(positions / size)) if positions else size


def _filled_up(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of `weight` with rows of zeros up to a multiple of `ALIGNED_ENTRIES`.

    Of V = 58,101 entries each row of logits would begin at an address that suits no vector load.
    """
    entries, width = weight.shape
    filled = weight.new_zeros(entries + -entries % ALIGNED_ENTRIES, width, dtype=dtype)
    filled[:entries] = weight
    return filled


@cache
def _compiled_kernel(backend: Any) -> Any:
    """`_loss_and_gradient` as one graph for chunks of all sizes."""
    compiled = torch.compile(_loss_and_gradient, backend=backend)

    def kernel(logits: Tensor, label: Tensor, *settings: Any) -> Any:
        for tensor in (logits, label):
            with suppress(AttributeError):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits, label, *settings)

    return kernel


def _loss_and_gradient(
    logits: Tensor,
    label: Tensor,
    terms: LossTerms,
    entries: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`loss_sum` of `logits` `[rows, V]`, its gradient in `dtype`, and the bias' gradient.

    The gradient is written over the logits, except by compiled code: its kernels hold no wide one.
    Logits after the first V `entries` are fillers, whose gradient has no meaning.

    With smoothing e the target is t = (1 - e) * one_hot(label) + e / V, the cross-entropy is
    logsumexp(logits) - t · logits, and its gradient is softmax(logits) - t.
    """
    is_compiled = torch.compiler.is_compiling()
    if is_compiled:
        logits = logits.clone()
    label_smoothing, r_drop_alpha = terms
    target_logits = logits.gather(1, label)
    mean_logits = logits[:, :entries].mean(-1, keepdim=True) if label_smoothing else 0.0
    largest = logits.amax(-1, keepdim=True)
    difference = torch.sub(*logits.chunk(2)) if r_drop_alpha else None
    gradient = torch.softmax(logits, -1, out=logits)
    # The largest probability is 1 / sum(exp(logits - largest)); it never underflows.
    loss = largest - gradient.amax(-1, keepdim=True).log()
    loss -= (1 - label_smoothing) * target_logits + label_smoothing * mean_logits
    total = loss.sum()
    if difference is not None:
        total += _add_divergence(gradient, difference, r_drop_alpha)
    if label_smoothing:
        gradient -= label_smoothing / entries
    if is_compiled:
        # A scatter would be a kernel of its own.
        is_label = torch.arange(gradient.shape[1], device=label.device) == label
        gradient = torch.where(is_label, gradient + (label_smoothing - 1), gradient)
    else:
        gradient.scatter_add_(1, label, gradient.new_full(label.shape, label_smoothing - 1))
    return total, gradient.to(dtype), gradient[:, :entries].sum(0) if has_bias else None


def _add_divergence(probabilities: Tensor, difference: Tensor, alpha: float) -> Tensor:
    """Weighted `divergence_sum` of the halves p and q, to which it adds its gradient.

    With r = log p - log q the divergence is (p - q) · r / 2, and its gradient for the logits of p
    is (p * (1 + r - p · r) - q) / 2, likewise for those of q. The `difference` of the logits,
    whose memory is reused, replaces r: a constant added to r cancels out.
    """
    p, q = probabilities.chunk(2)
    p_mean, q_mean = (torch.linalg.vecdot(half, difference).unsqueeze(-1) for half in (p, q))
    grad_p = (difference + (1 - p_mean)).mul_(p).sub_(q)
    grad_q = torch.sub(1 + q_mean, difference, out=difference).mul_(q).sub_(p)
    p.add_(grad_p, alpha=alpha / 2)
    q.add_(grad_q, alpha=alpha / 2)
    return alpha / 2 * (p_mean - q_mean).sum()
