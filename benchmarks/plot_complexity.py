#!/usr/bin/env python
"""Processor time of our self-attention over n and d, with the formulas of the paper's table 1.

Points are medians of the rounds: equation (1) alone, and the layer with its projections. Lines are
the formulas with k = 3 and r = 64, scaled so that n² d meets equation (1) at n = d = --fixed.

Example:
  python benchmarks/plot_complexity.py --rounds 15 --picture complexity.svg
"""

import statistics
import time
from functools import partial
from pathlib import Path

import torch

from figures import new_figure, save_figure
from lab import Report, benchmark_parser, take_turns
from vanilla_transformer import VanillaTransformerConfig, layers_vanilla_transformer

STYLES = {"equation (1)": "ko", "whole layer": "k^", "self-attention, n² d": "k-"}
STYLES |= {"recurrent, n d²": "--", "convolutional, k n d²": "-.", "restricted, r n d": ":"}
SIZES = (64, 128, 256, 512, 1024, 2048)


def complexities(n: int, d: int, k: int = 3, r: int = 64) -> tuple[int, ...]:
    """Multiplications of each layer of table 1."""
    return n * n * d, n * d * d, k * n * d * d, min(n, r) * n * d


def milliseconds(n: int, d: int) -> tuple[float, float]:
    """Processor time of equation (1) and of the whole layer, eager, one sequence, 8 heads."""
    torch.set_num_threads(1)
    layer = layers_vanilla_transformer.SelfAttention(VanillaTransformerConfig(d_model=d), 8)
    with torch.inference_mode():
        x = torch.randn(1, n, d)
        parts = map(
            layers_vanilla_transformer.split_heads,
            layer.qkv_proj(x).split(layer.widths, dim=-1),
            layer.head_shapes,
        )
        start = time.thread_time()
        layers_vanilla_transformer.eager_attention_forward(layer, *parts, None, layer.scaling)
        middle = time.thread_time()
        layer(x, None, attn_implementation="eager")
        return 1000 * (middle - start), 1000 * (time.thread_time() - middle)


def main() -> None:
    """Prints all points and lines in milliseconds, and draws them."""
    parser = benchmark_parser(__doc__, sizes=SIZES, rounds=15)
    parser.add_argument("--fixed", type=int, default=512, help="The other of n and d (512).")
    parser.add_argument("--picture", type=Path, help="File of the picture, .svg or .png.")
    options = parser.parse_args()
    fixed, sizes = options.fixed, sorted({*options.sizes, options.fixed})
    if wrong := [size for size in sizes if size < 8 or size % 8]:
        parser.error(f"--sizes and --fixed must be multiples of the 8 heads, got {wrong[0]}")
    panels = {"tokens n": [(n, fixed) for n in sizes], "width d": [(fixed, d) for d in sizes]}
    points = {size: partial(milliseconds, *size) for panel in panels.values() for size in panel}
    times = take_turns(points, options.rounds)
    rows = {size: [*map(statistics.median, zip(*times[size], strict=True))] for size in times}
    unit = rows[fixed, fixed][0] / complexities(fixed, fixed)[0]
    report = Report(options.output)
    report.table("Milliseconds", "n", "d", *STYLES)
    for size, cells in rows.items():
        cells += [unit * count for count in complexities(*size)]
        report.row(*size, *(f"{each:.2f}" for each in cells))
    if options.picture:
        drawn = {axis: [rows[size] for size in panels[axis]] for axis in panels}
        draw(drawn, sizes, fixed, options.picture)


def draw(panels: dict[str, list[list[float]]], sizes: list[int], fixed: int, path: Path) -> None:
    """Draws the cells of each panel over its sizes."""
    figure = new_figure(9, 4)
    for axes, (axis, rows) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for name, column in zip(STYLES, zip(*rows, strict=True), strict=True):
            axes.loglog(sizes, column, STYLES[name], label=name)
        axes.set(xlabel=f"{axis}, the other {fixed}", ylabel="milliseconds")
    axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
