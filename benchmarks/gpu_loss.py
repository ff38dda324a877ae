"""The fused loss against float64, and its time and memory, for each size of a chunk."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gpu_report import Report, growth_of, seconds_of
from neighbours import best_device
from rounds import take_turns
from vanilla_transformer import loss_vanilla_transformer
from vanilla_transformer.loss_vanilla_transformer import LossTerms, loss_sum
from vanilla_transformer.projection_vanilla_transformer import projected_loss_sum

NOTE = (
    "Forward and backward pass of projection and loss, divided by the number of targets. An error "
    "is the length of the difference from float64, relative to the length of the value in float64; "
    "it is measured on fewer targets than time and memory. `default`: the rows that the package "
    "chooses. `compiled`: the same rows, softmax and loss as one graph, as with --compile_layers. "
    "`unfused`: all logits at once, by autograd. Parameters are float32; other types are those of "
    "autocast."
)
COLUMNS = ("type", "V", "loss", "rows", "error of loss", "of hidden states", "of weights")
COLUMNS += ("ms", "MB")
TERMS = {
    "plain": LossTerms(),
    "smoothed": LossTerms(label_smoothing=0.1),
    "smoothed, R-Drop": LossTerms(label_smoothing=0.1, r_drop_alpha=5.0),
}
DEFAULT, COMPILED, UNFUSED = "default", "compiled", "unfused"
# What torch's GradScaler begins with.
FLOAT16_SCALE = 2.0**16


@dataclass(frozen=True)
class Sizes:
    """What is swept.

    Attributes:
        width: Entries of a hidden state.
        vocabularies: Sizes of the vocabulary.
        rows: Of a chunk of logits.
        exact: Targets that errors are measured on.
        timed: Targets that time and memory are measured on.
        rounds: Timed.
        compiler: Backend of `COMPILED`.
    """

    width: int
    vocabularies: tuple[int, ...]
    rows: tuple[int, ...]
    exact: int
    timed: int
    rounds: int
    compiler: str = "inductor"


# WMT's 37,000 is no multiple of 64; 256,206 is NLLB's. The last chunk is never full.
FULL = Sizes(512, (37_000, 256_206, 32_000), (256, 1024, 4096, 8192), 2054, 25_000, rounds=5)
# Generating C++ takes a minute.
SMOKE = Sizes(16, (101,), (8, 64), 30, 60, rounds=1, compiler="aot_eager")


@dataclass(frozen=True)
class Problem:
    """A projection and its targets; the same for the same sizes.

    Attributes:
        dtype: "float32", or the dtype of matrix products under autocast.
        terms: Of the loss.
        width: Entries of a hidden state.
        vocabulary: Number of entries.
        targets: Number of targets, both passes of R-Drop counted.
        compiler: Backend of `COMPILED`.
    """

    dtype: str
    terms: LossTerms
    width: int
    vocabulary: int
    targets: int
    compiler: str = "inductor"

    def tensors(self) -> tuple[nn.Linear, Tensor, Tensor]:
        """Projection, hidden states `[P, N, D]`, and labels `[P, N]`, in float32."""
        torch.manual_seed(0)
        passes = 2 if self.terms.r_drop_alpha else 1
        count = self.targets // passes
        head = nn.Linear(self.width, self.vocabulary, bias=False, device=best_device())
        hidden = torch.randn(passes, count, self.width, device=best_device(), requires_grad=True)
        labels = torch.randint(self.vocabulary, (1, count), device=best_device())
        return head, hidden, labels.expand(passes, -1)

    def solve(
        self, head: nn.Linear, hidden: Tensor, labels: Tensor, rows: int | str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and its gradients for hidden states and weights.

        Args:
            head: These three as `tensors` returns them.
            hidden: See `head`.
            labels: See `head`.
            rows: Of a chunk of logits, `DEFAULT`, `COMPILED` or `UNFUSED`.
        """
        narrow = self.dtype != "float32"
        with (
            torch.autocast(best_device(), getattr(torch, self.dtype), enabled=narrow),
            chunks_of(rows),
        ):
            if rows == UNFUSED:
                total = loss_sum(head(hidden), labels, self.terms)
            else:
                compiler = self.compiler if rows == COMPILED else None
                total = projected_loss_sum(head, hidden, labels, self.terms, compiler=compiler)
        loss = total / labels.numel()
        scale = FLOAT16_SCALE if self.dtype == "float16" else 1
        gradients = torch.autograd.grad(scale * loss, (hidden, head.weight))
        return loss.detach(), *(gradient / scale for gradient in gradients)

    def solve_exactly(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in float64, from all logits at once."""
        head, hidden, labels = self.tensors()
        exact = replace(self, dtype="float32")
        wide = hidden.detach().double().requires_grad_()
        return exact.solve(head.double(), wide, labels, UNFUSED)


def chunks_of(rows: int | str) -> Any:
    """Sets the rows of a chunk of logits."""
    if isinstance(rows, str):
        return nullcontext()
    return patch.object(loss_vanilla_transformer, "chunk_rows", lambda *_: rows)


def error(value: Tensor, exact: Tensor) -> float:
    """Length of the difference relative to that of the exact value."""
    return float((value.double() - exact).norm() / exact.norm())


def run(report: Report, smoke: bool) -> None:
    """Fills a table."""
    sizes = SMOKE if smoke else FULL
    table = report.table("Fused loss", *COLUMNS)
    for vocabulary, (name, terms) in product(sizes.vocabularies, TERMS.items()):
        where = f"{vocabulary} entries, {name}"
        shape = sizes.width, vocabulary, sizes.exact
        problem = Problem("float32", terms, *shape, sizes.compiler)
        exact = report.attempt(f"{where}, float64", problem.solve_exactly)
        if exact is None:
            continue
        for dtype in ("bfloat16", "float32", "float16"):
            errors, costs = measure(report, replace(problem, dtype=dtype), exact, sizes, where)
            for rows in costs:
                report.add(table, dtype, vocabulary, name, rows, *errors[rows], *costs[rows])


def measure(
    report: Report, problem: Problem, exact: tuple[Tensor, ...], sizes: Sizes, where: str
) -> tuple[dict[int | str, list[float]], dict[int | str, tuple[float, float | None]]]:
    """Errors, and milliseconds and megabytes, by the rows of a chunk; failures are left out."""
    timed = replace(problem, targets=sizes.timed)
    # After eight graphs of one function torch would compile no more.
    torch.compiler.reset()
    errors: dict[int | str, list[float]] = {}
    growths: dict[int | str, float | None] = {}

    def first_run(rows: int | str) -> None:
        found = problem.solve(*problem.tensors(), rows)
        errors[rows] = [error(*pair) for pair in zip(found, exact, strict=True)]
        tensors = timed.tensors()
        growths[rows] = growth_of(partial(timed.solve, *tensors, rows))

    for rows in (*sizes.rows, DEFAULT, COMPILED, UNFUSED):
        report.attempt(f"{where}, {problem.dtype}, {rows} rows", partial(first_run, rows))
    tensors = timed.tensors()
    contenders = {
        rows: partial(seconds_of, partial(timed.solve, *tensors, rows)) for rows in growths
    }
    seconds = take_turns(contenders, sizes.rounds)
    return errors, {rows: (1000 * median(seconds[rows]), growths[rows]) for rows in growths}
