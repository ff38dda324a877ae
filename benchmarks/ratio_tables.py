"""Markdown tables of contenders, their speeds and their ratios."""

from collections.abc import Iterable, Sequence
from statistics import median


def head(*columns: str) -> str:
    """The header of a table, with the line below it."""
    return f"{row(*columns)}\n{row(*['---'] * len(columns))}"


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def ratio(values: Sequence[float], reference: Sequence[float]) -> str:
    """The median of the rounds, divided by that of a reference."""
    return f"{median(values) / median(reference):.2f}"


def rate(count: int, seconds: Sequence[float], decimals: int = 0) -> str:
    """Items per second in the median round."""
    return f"{count / median(seconds):,.{decimals}f}"


def rate_range(count: int, seconds: Sequence[float], decimals: int = 0) -> str:
    """Items per second in the slowest and in the fastest round."""
    return "-".join(f"{count / each(seconds):,.{decimals}f}" for each in (max, min))


def megabytes(sizes: Iterable[float]) -> list[str]:
    """Bytes as whole megabytes."""
    return [f"{size / 1e6:,.0f}" for size in sizes]
