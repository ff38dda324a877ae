#!/usr/bin/env python
"""Processor time of our self-attention over n and d, with the formulas of the paper's table 1.

Points are medians of the rounds: equation (1) alone, and the layer with its projections. Lines are
the formulas with k = 3 and r = 64, scaled so that n² d meets equation (1) at n = d = --fixed.

Example:
  python benchmarks/plot_complexity.py --rounds 15 --output complexity.svg
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

from ratio_tables import head, row
from rounds import take_turns

STYLES = {"equation (1)": "ko", "whole layer": "k^", "self-attention, n² d": "k-"}
STYLES |= {"recurrent, n d²": "--", "convolutional, k n d²": "-.", "restricted, r n d": ":"}


def complexities(n: int, d: int, k: int = 3, r: int = 64) -> tuple[int, ...]:
    """Multiplications of each layer of table 1."""
    return n * n * d, n * d * d, k * n * d * d, min(n, r) * n * d


def milliseconds(n: int, d: int) -> tuple[float, float]:
    """Of equation (1) and of the whole layer, eager, for one sequence and 8 heads."""
    import torch

    from vanilla_transformer import VanillaTransformerConfig, attention_vanilla_transformer

    torch.set_num_threads(1)
    layer = attention_vanilla_transformer.SelfAttention(VanillaTransformerConfig(d_model=d), 8)
    with torch.inference_mode():
        x = torch.randn(1, n, d)
        parts = layer.split_heads(layer.qkv_proj(x))
        start = time.thread_time()
        attention_vanilla_transformer.eager_attention_forward(layer, *parts, None, layer.scaling)
        middle = time.thread_time()
        layer(x, None, attn_implementation="eager")
        return 1000 * (middle - start), 1000 * (time.thread_time() - middle)


def main() -> None:
    """Prints all points and lines in milliseconds, and draws them."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--output", type=Path, default="complexity.svg", help=".svg or .png (complexity.svg)"
    )
    integer, sizes = {"type": int}, [64, 128, 256, 512, 1024, 2048]
    parser.add_argument("--sizes", **integer, nargs="+", default=sizes, help="(64 128 ... 2048)")
    parser.add_argument("--fixed", **integer, default=512, help="the other of n and d (512)")
    parser.add_argument("--rounds", **integer, default=15, help="timed rounds (15)")
    options = parser.parse_args()
    fixed, sizes = options.fixed, sorted({*options.sizes, options.fixed})
    if wrong := [size for size in sizes if size < 8 or size % 8]:
        parser.error(f"--sizes and --fixed must be multiples of the 8 heads, got {wrong[0]}")
    # Imported late: it loads torch, and `--help` should answer at once.
    from vanilla_transformer_tools.figures import new_figure, save_figure

    try:
        figure = new_figure(9, 4)
    except ImportError as error:
        parser.error(str(error))
    panels = {"tokens n": [(n, fixed) for n in sizes], "width d": [(fixed, d) for d in sizes]}
    points = {size: partial(milliseconds, *size) for panel in panels.values() for size in panel}
    times = take_turns(points, options.rounds)
    rows = {size: [*map(statistics.median, zip(*times[size], strict=True))] for size in times}
    unit = rows[fixed, fixed][0] / complexities(fixed, fixed)[0]
    print(head("n", "d", *STYLES))
    for size, cells in rows.items():
        cells += [unit * count for count in complexities(*size)]
        print(row(*size, *(f"{each:.2f}" for each in cells)))
    for axes, axis in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        columns = zip(*map(rows.get, panels[axis]), strict=True)
        for name, column in zip(STYLES, columns, strict=True):
            axes.loglog(sizes, column, STYLES[name], label=name)
        axes.set(xlabel=f"{axis}, the other {fixed}", ylabel="milliseconds")
    axes.legend()
    save_figure(figure, options.output)


if __name__ == "__main__":
    main()
