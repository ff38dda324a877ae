#!/usr/bin/env python
"""What each trick of the plugin's `fast_*` files gains on a CPU: one table, in a few minutes.

Each trick is switched off and on in turn in one process. A row gives the lines that the trick takes
and the median over the rounds of what a step takes without it, divided by what it takes with it: in
CPU seconds and on the clock, or in memory. A trick is kept if one of its rows saves 5 %. A machine
with a GPU needs CUDA_VISIBLE_DEVICES= before the command.

Examples:
  python benchmarks/tricks.py
  python benchmarks/tricks.py --rounds 15 --threads 2 --tricks dropout layouts
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BatchEncoding, PreTrainedModel

import neighbours
from lab import PRESETS, Report, benchmark_parser, measure_alone, take_turns
from vanilla_transformer import fast_layers_vanilla_transformer as layers
from vanilla_transformer import fast_loss_vanilla_transformer as loss
from vanilla_transformer import modules_vanilla_transformer as modules
from vanilla_transformer import search_vanilla_transformer as search
from vanilla_transformer.backend_vanilla_transformer import SourceLengthLimit
from vanilla_transformer.fast_vanilla_transformer import FastBackend
from vanilla_transformer.layers_vanilla_transformer import Attention, run_kernel
from vanilla_transformer.modeling_vanilla_transformer import Backend

Step = Callable[[], object]
VOCABULARY = {"tiny": 8000, "base": 37_000}
LENGTH = 24
LEAST_GAIN = 1.05


def build(preset: str) -> PreTrainedModel:
    """A new model of a preset."""
    sizes = PRESETS[preset].config() | {"vocab_size": VOCABULARY[preset]}
    return neighbours.build("vanilla", label_smoothing=0.1, **sizes)


def training(preset: str, sentences: int, dtype: str = "float32", length: int = LENGTH) -> Step:
    """A whole step, of pairs of so many tokens a side."""
    ids = torch.randint(4, VOCABULARY[preset], (sentences, length))
    batch = BatchEncoding({"input_ids": ids, "labels": ids})
    return neighbours.Training(build(preset), [batch], dtype).run


def generation(preset: str, sentences: int, num_beams: int) -> Step:
    """A call of `generate` whose sentences end after 1 to `LENGTH` tokens."""
    model = build(preset).eval()
    ids = torch.randint(4, VOCABULARY[preset], (sentences, LENGTH))
    limits = torch.linspace(LENGTH if sentences == 1 else 1, LENGTH, sentences).long()
    settings = {"num_beams": num_beams, "max_length": LENGTH + 1, "suppress_tokens": [2]}

    def step() -> None:
        criteria = [SourceLengthLimit(limits)]
        model.generate(ids, **settings, stopping_criteria=criteria)

    return step


class Trick(NamedTuple):
    """A trick: its code, how it is switched off, and what it is measured on."""

    code: list[Any]
    off: Callable[[], AbstractContextManager[object]]
    rows: dict[str, Callable[[], Step]]


def training_step_alone(is_chunked: bool) -> None:
    """A step of `base` with the longest batch that a small machine holds, for its memory."""
    with nullcontext() if is_chunked else patch.object(FastBackend, "loss", Backend.loss):
        training("base", 48)()


def plain_linear(_: object, module: nn.Linear) -> Callable[..., torch.Tensor]:
    """Decoding with weights as they are stored."""
    return partial(F.linear, weight=module.weight, bias=module.bias)


def call_each(self: search.Constraints, processors: Any = ()) -> None:
    """Each processor is called; no bans are merged."""
    self.banned, self.others = set(), list(processors)


@contextmanager
def without_wide_kernels() -> Iterator[None]:
    """Attention in bfloat16 throughout; each module holds the function that it was given."""

    def call(module: Attention, *args: Any, **kwargs: Any) -> Any:
        return run_kernel(module, *args, **kwargs)

    code, layers.run_fast_kernel.__code__ = layers.run_fast_kernel.__code__, call.__code__
    try:
        yield
    finally:
        layers.run_fast_kernel.__code__ = code


def tricks() -> dict[str, Trick]:
    """All that a CPU can measure; compiled losses and rows filled up need a GPU."""
    generations = {
        f"generate {preset}, {sentences} x {beams}": partial(generation, preset, sentences, beams)
        for preset, sentences, beams in (
            ("tiny", 1, 1),
            ("tiny", 32, 4),
            ("base", 1, 1),
            ("base", 1, 4),
        )
    }
    many = {name: step for name, step in generations.items() if " 32 " in name}
    steps = {
        "train tiny": partial(training, "tiny", 80),
        "train base": partial(training, "base", 8),
    }
    narrow = {
        f"train tiny, bfloat16, {length} tokens": partial(
            training, "tiny", 32 * LENGTH // length, "bfloat16", length
        )
        for length in (LENGTH, 4 * LENGTH)
    }
    never_leaves = partial(patch.object, search, "LARGEST_FULL_SHARE", -1)
    bypassed = [modules.direct_call, modules.direct_copy, modules._run_torch_kernel]
    return {
        "dropout masks": Trick(
            [layers.Dropout],
            partial(patch.object, layers.Dropout, "forward", nn.Dropout.forward),
            steps,
        ),
        "loss in chunks": Trick(
            [loss], partial(patch.object, FastBackend, "loss", Backend.loss), steps
        ),
        "wide attention kernels": Trick([layers.run_fast_kernel], without_wide_kernels, narrow),
        "bypassed module calls": Trick(
            bypassed,
            partial(patch.object, modules, "is_untouched", lambda module: False),
            generations,
        ),
        "weight layouts": Trick(
            [layers.LaidOutWeight, layers.WeightLayouts],
            partial(patch.object, layers.WeightLayouts, "linear", plain_linear),
            generations,
        ),
        "sentences that leave": Trick(
            [search._leave, search.IncrementalDecoder.keep], never_leaves, many
        ),
        "merged bans": Trick(
            [search.Constraints],
            partial(patch.object, search.Constraints, "__init__", call_each),
            many,
        ),
        "own search": Trick(
            [search], partial(patch.object, FastBackend, "generate", Backend.generate), generations
        ),
    }


def measure(step: Step, context: Callable[[], AbstractContextManager[object]]) -> list[float]:
    """CPU seconds and seconds of a step."""
    with context():
        started = time.process_time(), time.perf_counter()
        step()
        ended = time.process_time(), time.perf_counter()
    return [end - start for start, end in zip(started, ended, strict=True)]


def gains(trick: Trick, rounds: int) -> Iterator[tuple[str, float, float]]:
    """For each row its name, and the median ratios without the trick to with it."""
    for name, build_step in trick.rows.items():
        step = build_step()
        contenders = {
            "on": partial(measure, step, nullcontext),
            "off": partial(measure, step, trick.off),
        }
        taken = take_turns(contenders, rounds, warm_ups=1)
        cpu, clock = (
            median(off[kind] / on[kind] for on, off in zip(taken["on"], taken["off"], strict=True))
            for kind in (0, 1)
        )
        yield name, cpu, clock
    if trick.code == [loss]:
        on, off = (
            measure_alone(training_step_alone, is_chunked).growth for is_chunked in (True, False)
        )
        yield "memory of train base", off / on, off / on


def main() -> None:
    """Prints the table."""
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--threads", type=int, default=1, help="Threads of torch; default: 1.")
    parser.add_argument("--tricks", nargs="+", help="Words in names of tricks; default: all.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = Report(args.output)
    columns = ("trick", "lines", "measured on", "off / on, CPU", "off / on, clock", "kept")
    report.table(f"{args.rounds} rounds", *columns)
    for name, trick in tricks().items():
        if args.tricks and not any(word in name for word in args.tricks):
            continue
        lines = sum(len(inspect.getsourcelines(part)[0]) for part in trick.code)
        rows = list(gains(trick, args.rounds))
        verdict = "kept" if max(cpu for _, cpu, _ in rows) >= LEAST_GAIN else "gone"
        for measured_on, cpu, clock in rows:
            report.row(name, lines, measured_on, f"{cpu:.3f}", f"{clock:.3f}", verdict)


if __name__ == "__main__":
    main()
