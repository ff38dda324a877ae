"""Pictures of the manual as SVG: `docs/generate.py` writes them."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

_STYLE = (
    "text{font:14px sans-serif;text-anchor:middle;fill:#222}"
    ".s{font-size:11px;fill:#555}.b{fill:#eef3fb;stroke:#4a6fa5}.n{fill:#fbf3e0;stroke:#a5854a}"
    ".f{fill:none;stroke:#999;stroke-dasharray:4 3}.a{fill:none;stroke:#444;marker-end:url(#h)}"
)


def _svg(title: str, width: int, height: int, shapes: Sequence[str]) -> str:
    """A picture on white, so that it can be read on a dark page too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    )
    tip = '<marker id="h" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
    tip += '<path d="M0 0L7 3L0 6z" fill="#444"/></marker>'
    back = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    parts = [head, f"<title>{title}</title>", f"<style>{_STYLE}</style><defs>{tip}</defs>", back]
    return "\n".join([*parts, *shapes, "</svg>"]) + "\n"


def _box(x: float, y: float, width: float, text: str, kind: str = "b", height: int = 28) -> str:
    """A box around (x, y) with a line of text."""
    rect = f'<rect class="{kind}" x="{x - width / 2:g}" y="{y - height / 2:g}" '
    rect += f'width="{width:g}" height="{height}" rx="4"/>'
    return rect + f'<text x="{x:g}" y="{y + 5:g}">{escape(text)}</text>'


def _note(x: float, y: float, text: str) -> str:
    return f'<text class="s" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _arrow(*points: tuple[float, float]) -> str:
    return '<path class="a" d="M' + "L".join(f"{x:g} {y:g}" for x, y in points) + '"/>'


def _layer(x: float, top: float, sublayers: Sequence[tuple[str, str]]) -> tuple[list[str], float]:
    """A pre-norm layer, read upwards: norm, sublayer and sum, for each sublayer.

    Returns:
        Its shapes, and the height at which the stream enters below.
    """
    height = 96 * len(sublayers)
    shapes = [
        f'<rect class="f" x="{x - 118:g}" y="{top:g}" width="236" height="{height + 6}" rx="8"/>'
    ]
    for index, (name, section) in enumerate(sublayers):
        y = top + height - 96 * index
        shapes += [
            _box(x, y - 18, 150, "LayerNorm", "n", 22),
            _arrow((x, y - 29), (x, y - 37)),
            _box(x, y - 52, 190, name),
            _note(x + 98, y - 72, section),
            _arrow((x, y - 66), (x, y - 73)),
            f'<circle class="n" cx="{x:g}" cy="{y - 82:g}" r="8"/>',
            f'<text x="{x:g}" y="{y - 77:g}">+</text>',
            _arrow((x, y + 1), (x - 108, y + 1), (x - 108, y - 82), (x - 9, y - 82)),
            _arrow((x, y + 6), (x, y - 6)),
        ]
    return shapes, top + height + 6


def stack() -> str:
    """Encoder and decoder as in figure 1, in the order of this code (pre-norm)."""
    left, right = 150.0, 440.0
    encoder, bottom = _layer(left, 218, [("SelfAttention", "3.2"), ("feed_forward", "3.3")])
    decoder, _ = _layer(
        right,
        122,
        [("SelfAttention, causal", "3.2.3"), ("CrossAttention", "3.2"), ("feed_forward", "3.3")],
    )
    shapes = [*encoder, *decoder]
    for x, label, words in ((left, "source", "Encoder"), (right, "target, shifted", "Decoder")):
        shapes += [
            _box(x, bottom + 34, 190, "√D · embedding"),
            _note(x + 122, bottom + 38, "3.4"),
            _arrow((x, bottom + 20), (x, bottom + 3)),
            _note(x + 60, bottom + 14, "+ positions, 3.5"),
            _arrow((x, bottom + 72), (x, bottom + 50)),
            f'<text x="{x:g}" y="{bottom + 88:g}">{label}</text>',
            _note(x - 98, bottom + 14, "N layers"),
            _note(x, bottom + 106, words),
        ]
    shapes += [
        _arrow((left, 218 + 6), (left, 204)),
        _box(left, 190, 150, "LayerNorm", "n"),
        _arrow((left, 176), (left, 160), (290, 160), (290, 262), (right - 96, 262)),
        _note(264, 152, "keys and values"),
        _arrow((right, 122 + 6), (right, 110)),
        _box(right, 96, 150, "LayerNorm", "n"),
        _arrow((right, 82), (right, 70)),
        _box(right, 54, 190, "lm_head: the same table"),
        _note(right + 122, 58, "3.4"),
        _arrow((right, 40), (right, 26)),
        f'<text x="{right:g}" y="18">logits</text>',
    ]
    return _svg("Encoder and decoder of the Transformer", 600, round(bottom) + 116, shapes)


def rows(title: str, names: Sequence[Sequence[str]]) -> str:
    """Boxes in rows, of which the first is at the bottom."""
    shapes = []
    for number, row in enumerate(names):
        y = 44 * (len(names) - number) - 18
        width = 640 / len(row)
        shapes += [
            _box(width * (index + 0.5) + 10, y, width - 10, name, "b" if number else "n", 32)
            for index, name in enumerate(row)
        ]
    return _svg(title, 660, 44 * len(names) + 8, shapes)
