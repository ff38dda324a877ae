"""Figures of matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vanilla_transformer_tools.files import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure.

    Args:
        width: In inches.
        height: In inches.

    Raises:
        ImportError: If matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures are drawn by matplotlib: pip install -e '.[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a picture, .png or .svg, whole or not at all; the same picture is the same file."""
    from matplotlib import rc_context

    is_svg = path.suffix == ".svg"
    # Else an .svg has names at random, and a date.
    with rc_context({"svg.hashsalt": path.stem}), written_whole(path) as temporary:
        figure.savefig(
            temporary,
            format=path.suffix[1:],
            dpi=160,
            metadata={"Date": None} if is_svg else None,
        )
    return path
