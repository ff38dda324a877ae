"""Attention maps as one interactive HTML page that works offline."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.inspection.attention_maps import TITLES, AttentionMaps

_TEMPLATE = "attention_page.html"
_PLACE = ">DATA<"
# Escaped, so that no text can end the script element that holds it.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
_DIGITS = 4


def write_attention_page(
    maps: AttentionMaps,
    path: Path,
    *,
    kind: str = "cross",
    layer: int | None = None,
    head: int | None = None,
) -> Path:
    """Writes the page of `attention_page` to a file.

    Args:
        maps: Attention maps of one pair.
        path: File of the page.
        kind: Shown first.
        layer: Shown first, counted from 1; None: the one that alignments are read from.
        head: Shown first, counted from 1; None: the mean of all heads.

    Returns:
        The path.

    Raises:
        ValueError: If there is no such kind, layer or head.
    """
    return write_lines(path, [attention_page(maps, kind=kind, layer=layer, head=head)])


def attention_page(
    maps: AttentionMaps, *, kind: str = "cross", layer: int | None = None, head: int | None = None
) -> str:
    """A page on which readers choose kind, layer and head, and follow tokens.

    Args:
        maps: Attention maps of one pair. Weights are rounded to four digits.
        kind: Shown first.
        layer: Shown first, counted from 1; None: the one that alignments are read from.
        head: Shown first, counted from 1; None: the mean of all heads.

    Raises:
        ValueError: If there is no such kind, layer or head.
    """
    first = maps.of_kind(kind)
    first.select(layer, head)
    content = {
        "source": maps.source,
        "target": maps.target,
        "maps": [
            {
                "kind": part.kind,
                "title": TITLES[part.kind],
                "rows": part.rows,
                "columns": part.columns,
                "sums_to_one": part.sums_to_one,
                "weights": _rounded(part.weights.tolist()),
            }
            for part in (maps.encoder, maps.decoder, maps.cross)
        ],
        "view": {
            "kind": kind,
            "layer": layer or first.default_layer,
            "head": head or "mean",
        },
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)
    template = (
        files("vanilla_transformer_tools.inspection")
        .joinpath(_TEMPLATE)
        .read_text(encoding="utf-8")
    )
    before, after = template.split(_PLACE)
    return f"{before}>{data}<{after.rstrip()}"


def _rounded(weights: Any) -> Any:
    if isinstance(weights, list):
        return [_rounded(part) for part in weights]
    return round(weights, _DIGITS)
