"""Attention maps and positional encodings as figures of matplotlib (the extra `plot`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from vanilla_transformer_tools.inspection.attention_maps import AttentionMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_attention(
    attention: AttentionMap, *, layer: int | None = None, head: int | None = None
) -> Figure:
    """The weights of a layer and a head, or the mean of its heads; each row attends.

    Args:
        attention: The weights of one kind.
        layer: Counted from 1; None: the one that alignments are read from.
        head: Counted from 1; None: the mean of all heads.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is no such layer or head.
    """
    from matplotlib.figure import Figure

    weights = attention.select(layer, head)
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    largest = float(weights.abs().max())
    # Talking heads can make weights negative; a diverging colour map then keeps 0 white.
    is_positive = bool(weights.min() >= 0)
    colours = "Blues" if is_positive else "RdBu"
    lowest = 0 if is_positive else -largest
    image = axes.imshow(weights.numpy(), cmap=colours, vmin=lowest, vmax=largest)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(attention.columns)), attention.columns, rotation=90)
    axes.set_yticks(range(len(attention.rows)), attention.rows)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        # Dollar signs are text here, not TeX.
        label.set_parse_math(False)
    axes.set_title(attention.title(layer, head), fontsize=10)
    figure.colorbar(image)
    return figure


@torch.inference_mode()
def plot_positions(model: PreTrainedModel, positions: int = 64) -> Figure:
    """The encodings of the first source positions, `[positions, D]`; of a head if they are rotary.

    Args:
        model: A vanilla Transformer.
        positions: Number of positions.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    position_ids = torch.arange(positions, device=model.device)[None]
    encodings = model.get_encoder().embed_positions(position_ids, torch.float32)[0].flatten(1).cpu()
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    largest = float(encodings.abs().max())
    image = axes.imshow(encodings.numpy(), cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
    axes.set_xlabel("dimension of the model")
    axes.set_ylabel("position")
    figure.colorbar(image)
    return figure
