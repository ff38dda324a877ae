"""Attention maps and positional encodings as pictures, drawn by matplotlib (the extra `plot`)."""

from __future__ import annotations

import logging
import re
import unicodedata
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.figures import new_figure, save_figure
from vanilla_transformer_tools.inspection.attention_maps import AttentionMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

RIGHT_TO_LEFT_MARK = "\u200f"

# Families that cover many scripts, or one that matplotlib's own font lacks.
_OF_MANY_SCRIPTS = re.compile("Noto Sans|Unifont|Droid Sans|Arial Unicode|WenQuanYi|Hiragino Sans")
_GLYPH = re.compile(r"Glyph (\d+) .*missing from")

# In inches: a cell with room for its label, and the picture's longest side, which shrinks cells.
_CELL = 0.26
_LONGEST_SIDE = 24.0
_MARGIN = 1.6
# Characters that fit above a column without being turned, such as one or two Chinese ones.
_SHORT_LABEL = 2
# Far more than a picture has columns; more would only take memory.
_MOST_POSITIONS = 100_000


def plot_attention(
    attention: AttentionMap, path: Path, *, layer: int | None = None, head: int | None = None
) -> Path:
    """Draws the weights of a layer and a head, or the mean of its heads.

    Args:
        attention: The weights of one kind.
        path: Picture to write, .png, or .svg, whose text is drawn in the viewer's fonts.
        layer: Counted from 1; None: the one that alignments are read from.
        head: Counted from 1; None: the mean of all heads.

    Returns:
        The path.

    Raises:
        ImportError: If matplotlib is not installed; the message says how to install it.
        ValueError: If there is no such layer or head, or matplotlib does not know the suffix.
    """
    weights = attention.select(layer, head)
    rows, columns = weights.shape
    cell = min(_CELL, _LONGEST_SIDE / max(rows, columns))
    figure = new_figure(columns * cell + _MARGIN + 1, rows * cell + _MARGIN)
    axes = figure.subplots()
    lowest = float(weights.min())
    # Talking heads can make weights negative; a diverging colour map then keeps 0 white.
    largest = float(weights.abs().max())
    image = axes.imshow(
        weights.numpy(),
        cmap="Blues" if lowest >= 0 else "RdBu",
        vmin=0 if lowest >= 0 else -largest,
        vmax=largest,
    )
    axes.xaxis.tick_top()
    spell = _directed if path.suffix == ".svg" else str
    axes.set_xticks(range(columns), map(spell, attention.columns))
    axes.set_yticks(range(rows), map(spell, attention.rows))
    fonts = _fonts(path)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        # Dollar signs are text here, not TeX.
        label.set_parse_math(False)
        label.set_fontfamily(fonts)
        label.set_fontsize(min(10.0, 60 * cell))
    for label, token in zip(axes.get_xticklabels(), attention.columns, strict=True):
        label.set_rotation(90 if len(token) > _SHORT_LABEL else 0)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    axes.set_xlabel(
        "source" if attention.kind != "decoder" else "read so far", loc="left", color="gray"
    )
    axes.set_ylabel("source" if attention.kind == "encoder" else "written", loc="top", color="gray")
    figure.suptitle(attention.title(layer, head), fontsize=10, parse_math=False)
    figure.colorbar(image, shrink=min(1.0, 2 / (rows * cell)), aspect=12).outline.set_visible(False)
    return _save(figure, path)


def plot_positions(model: PreTrainedModel, path: Path, positions: int) -> Path:
    """Draws the position encodings of the first source positions.

    Args:
        model: A vanilla Transformer.
        path: Picture to write, .png or .svg.
        positions: Number of positions.

    Returns:
        The path.

    Raises:
        ImportError: If matplotlib is not installed; the message says how to install it.
        ValueError: If the number is out of range, or the model is of another class.
    """
    if not 1 <= positions <= _MOST_POSITIONS:
        raise ValueError(
            f"`positions` must be between 1 and {_MOST_POSITIONS:,}, got {positions:,}."
        )
    encodings = position_encodings(model, positions)
    figure = new_figure(7.0, 4.5)
    axes = figure.subplots()
    largest = float(encodings.abs().max())
    image = axes.imshow(
        encodings.numpy(),
        cmap="RdBu",
        vmin=-largest,
        vmax=largest,
        aspect="auto",
        # Columns that share a pixel must not be left out.
        interpolation="antialiased",
    )
    axes.set_xlabel("dimension of the model")
    axes.set_ylabel("position")
    axes.set_title(f"positional encodings, {model.config.position_embedding_type}", fontsize=10)
    figure.colorbar(image).outline.set_visible(False)
    return _save(figure, path)


@torch.inference_mode()
def position_encodings(model: PreTrainedModel, positions: int) -> Tensor:
    """Encodings of the first source positions, `[positions, D]`.

    Raises:
        ValueError: If the model is of another class, whose positions may have other forms.
    """
    if model.config.model_type != VanillaTransformerConfig.model_type:
        raise ValueError(
            "Positions are drawn of models of this package, got the type "
            f"{model.config.model_type!r}. Bring it in by `vanilla-transformer import`."
        )
    position_ids = torch.arange(positions, device=model.device)[None]
    encodings: Tensor = model.get_encoder().embed_positions(position_ids, torch.float32)
    return encodings[0].cpu()


def _save(figure: Figure, path: Path) -> Path:
    """Writes a picture; text in an .svg stays text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings(record=True) as raised:
        warnings.filterwarnings("always", message="Glyph .* missing from")
        saved = save_figure(figure, path)
    missing = {
        chr(int(match[1])) for warning in raised if (match := _GLYPH.match(str(warning.message)))
    }
    if missing and path.suffix != ".svg":
        logger.warning(
            "No installed font has the characters %s: the picture shows boxes for them. Install "
            "one that has them (such as one of the Noto family), or write .svg or .html, which "
            "use the viewer's fonts.",
            " ".join(sorted(missing)),
        )
    return saved


def _directed(text: str) -> str:
    """Puts a mark before Arabic, Hebrew and so on; otherwise SVG text runs left to right."""
    kinds = {*map(unicodedata.bidirectional, text)}
    return RIGHT_TO_LEFT_MARK + text if kinds & {"R", "AL"} else text


def _fonts(path: Path) -> list[str]:
    """Families to draw labels in: matplotlib's own, then installed ones, or the viewer's."""
    from matplotlib.font_manager import get_font_names

    if path.suffix == ".svg":
        return ["DejaVu Sans", "sans-serif"]
    return ["DejaVu Sans", *sorted(filter(_OF_MANY_SCRIPTS.match, get_font_names()))]
