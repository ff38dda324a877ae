#!/usr/bin/env python
"""What each trick of the plugin's `fast_*` files gains: one table, on a CPU.

Each trick is switched off and on in turn in one process. A row is the median over the rounds of the
time without the trick divided by that with it, in CPU seconds and on the clock.

Examples:
  python benchmarks/tricks.py
  python benchmarks/tricks.py --rounds 15 --threads 2 --tricks dropout layouts
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from lab import Report, benchmark_parser, take_turns
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    fast_layers_vanilla_transformer,
    fast_search_vanilla_transformer,
)
from vanilla_transformer_tools.settings import PRESETS

Step = Callable[[], None]
Off = Callable[[], AbstractContextManager[object]]
VOCABULARY = {"tiny": 8000, "base": 37_000}
LENGTH = 24


def build(preset: str) -> VanillaTransformerForConditionalGeneration:
    """A new model of a preset."""
    config = VanillaTransformerConfig(
        **{**PRESETS[preset].config(), "vocab_size": VOCABULARY[preset], "label_smoothing": 0.1}
    )
    return VanillaTransformerForConditionalGeneration(config)


def training_step(preset: str, sentences: int) -> Step:
    """A whole step, of pairs of `LENGTH` tokens a side."""
    model = build(preset).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
    ids = torch.randint(4, VOCABULARY[preset], (sentences, LENGTH))

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def generation(preset: str, sentences: int, num_beams: int) -> Step:
    """A call of `generate` that writes `LENGTH` tokens a sentence."""
    model = build(preset).eval()
    ids = torch.randint(4, VOCABULARY[preset], (sentences, LENGTH))
    search = {"num_beams": num_beams, "max_length": LENGTH, "suppress_tokens": [2]}

    def step() -> None:
        model.generate(ids, **search)

    return step


def ratios(step: Step, off: Off, rounds: int) -> list[float]:
    """Median ratios of CPU seconds and of seconds, without the trick to with it."""

    def timed(context: Off) -> tuple[float, float]:
        with context():
            started = time.process_time(), time.perf_counter()
            step()
            return time.process_time() - started[0], time.perf_counter() - started[1]

    contenders = {"off": partial(timed, off), "on": partial(timed, nullcontext)}
    seconds = take_turns(contenders, rounds, warm_ups=2)
    pairs = zip(seconds["off"], seconds["on"], strict=True)
    quotients = [(off[0] / on[0], off[1] / on[1]) for off, on in pairs]
    return [statistics.median(each) for each in zip(*quotients, strict=True)]


def without_layouts() -> AbstractContextManager[object]:
    """Decoding with weights as they are stored."""

    def linear(_: object, module: nn.Linear) -> Callable[..., torch.Tensor]:
        return partial(F.linear, weight=module.weight, bias=module.bias)

    return patch.object(fast_layers_vanilla_transformer.WeightLayouts, "linear", linear)


def main() -> None:
    """Prints the table."""
    parser = benchmark_parser(__doc__, rounds=7)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--tricks", nargs="+", help="names of rows (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    layers, search = fast_layers_vanilla_transformer, fast_search_vanilla_transformer
    called = partial(patch.object, search, "is_untouched", lambda module: False)
    plain_dropout = partial(patch.object, layers.Dropout, "forward", nn.Dropout.forward)
    rows: list[tuple[str, str, Callable[[], Step], Off]] = [
        ("dropout", "training tiny", partial(training_step, "tiny", 80), plain_dropout),
        ("dropout", "training base", partial(training_step, "base", 24), plain_dropout),
    ]
    for preset, sentences, beams in (
        ("tiny", 1, 1),
        ("tiny", 32, 4),
        ("base", 1, 1),
        ("base", 1, 4),
    ):
        of = f"generate {preset}, {sentences} x {beams}"
        rows.append(("bypass", of, partial(generation, preset, sentences, beams), called))
        rows.append(("layouts", of, partial(generation, preset, sentences, beams), without_layouts))
    report = Report(args.output)
    report.table("Tricks", "trick", "measured on", "off / on, CPU", "off / on, clock")
    for name, of, build_step, off in rows:
        if not args.tricks or name in args.tricks:
            found = ratios(build_step(), off, args.rounds)
            report.row(name, of, *(f"{each:.3f}" for each in found))


if __name__ == "__main__":
    main()
