"""How a model uses its output projection: for the loss, and as a table of embeddings if it is one.

Shapes: B batch · T target · Q positions of either side · D `d_model` · V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss_vanilla_transformer import (
    IGNORED,
    PLAIN,
    LossTerms,
    ProjectedLoss,
    loss_sum_by_module,
)
from .shortcuts_vanilla_transformer import is_plain_linear, is_sharded, is_untouched


def projected_loss_sum(
    lm_head: nn.Module,
    hidden_states: Tensor,
    labels: Tensor,
    terms: LossTerms = PLAIN,
    matrix: Tensor | None = None,
    compiler: Any = None,
) -> Tensor:
    """`loss_sum(lm_head(hidden_states), ...)` in O(`CHUNK_ROWS` * V) memory.

    Compiled, it takes an eighth of the positions at a time.

    Args:
        lm_head: Output projection; anything but a plain matrix (LoRA, quantised, offloaded) is
            called.
        hidden_states: `[B, T, D]`; with R-Drop B is even, the first passes before the second.
        labels: `[B, T]`, -100 at positions without a target.
        terms: Of the loss.
        matrix: Of `lm_head`, if `tied_lookups` returned it.
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
    if is_plain_linear(lm_head):
        weight = lm_head.weight if matrix is None else matrix
        args = (hidden_states, weight, lm_head.bias, labels, terms, compiler)
        total: Tensor = ProjectedLoss.apply(*args)  # type: ignore[no-untyped-call]
        return total
    return loss_sum_by_module(lm_head, hidden_states, labels, terms)


class Lookup(NamedTuple):
    """What a stack embeds.

    Attributes:
        ids: Tokens `[B, Q]`.
        rows: Instead of `ids`: their rows of the table, `[B, Q, D]`.
    """

    ids: Tensor | None
    rows: Tensor | None


def tied_lookups(
    lm_head: nn.Module, *lookups: tuple[nn.Module, Lookup]
) -> tuple[Tensor | None, list[Lookup]]:
    """Looks up the rows of tables that are tied to the output projection.

    All uses of such a matrix have one gradient together; autograd would form one as large as the
    matrix for each.

    Args:
        lm_head: Output projection.
        lookups: Tables, and what is looked up in them.

    Returns:
        The matrix for `projected_loss_sum`, None if there is none, and the lookups with their rows.
        Those whose table has to be called are as before.
    """
    tied = [
        lookup.rows is None and lookup.ids is not None and _is_tied(table, lm_head)
        for table, lookup in lookups
    ]
    found = [lookup for _, lookup in lookups]
    if not any(tied):
        return None, found
    # All of them are one matrix, with one row for padding.
    padding_idx = lookups[tied.index(True)][0].padding_idx
    ids = [lookup.ids for lookup, is_tied in zip(found, tied, strict=True) if is_tied]
    matrix, *rows = TiedTable.apply(  # type: ignore[no-untyped-call]
        lm_head.weight, padding_idx, *ids
    )
    new = iter(rows)
    return matrix, [
        Lookup(None, next(new)) if is_tied else lookup
        for lookup, is_tied in zip(found, tied, strict=True)
    ]


def _is_tied(table: nn.Module, lm_head: nn.Module) -> bool:
    """Whether `table` and `lm_head` are one matrix, and neither has to be called."""
    return (
        type(table) is nn.Embedding
        and not is_sharded(lm_head)
        and is_plain_linear(lm_head)
        and table.weight is lm_head.weight
        and is_untouched(table)
        # A hook may require gradients of the rows of a frozen one.
        and table.weight.requires_grad
        # On a GPU the sum would depend on the order of its threads.
        and table.weight.device.type == "cpu"
        # Narrow sums would be rounded after each row.
        and table.weight.dtype in (torch.float32, torch.float64)
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not torch.compiler.is_compiling()
    )


class TiedTable(torch.autograd.Function):
    """A matrix that is the output projection and a table of embeddings."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, padding_idx: int | None, *ids: Tensor
    ) -> tuple[Tensor, ...]:
        """The matrix `[V, D]`, and its rows `[*, D]` for each tensor of ids."""
        ctx.padding_idx = padding_idx
        ctx.shape = weight.shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*ids)
        return weight.view_as(weight), *(F.embedding(one, weight) for one in ids)

    @staticmethod
    def backward(
        ctx: Any, grad_matrix: Tensor | None, *grad_rows: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Adds the gradients of rows to the projection's, in its memory.

        Nobody else has that one: the matrix is used by `ProjectedLoss` alone.
        """
        gradient = grad_matrix
        for ids, rows in zip(ctx.saved_tensors, grad_rows, strict=True):
            if rows is None:
                continue
            if gradient is None:
                gradient = rows.new_zeros(ctx.shape)
            rows, ids = rows.flatten(0, -2), ids.flatten()
            if ctx.padding_idx is not None:
                rows = rows.masked_fill((ids == ctx.padding_idx)[:, None], 0)
            if torch.is_grad_enabled():
                # With `create_graph=True`, the gradient is differentiated in turn.
                gradient = gradient.index_add(0, ids, rows)
                continue
            # torch 2.11 warns of the argument `check_invariants=False`.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                added = torch.sparse_coo_tensor(ids[None], rows, ctx.shape)
            gradient = gradient.add_(added)
        return gradient, None, *(None for _ in grad_rows)
