"""Searches of this package and of Transformers, on one model with random weights."""

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from transformers.utils.logging import disable_progress_bar

from generation_contenders import (
    M2M100,
    Generate,
    Inherited,
    Task,
    write_folders,
    write_random_model,
)
from generation_rounds import Result, make_task, read_sources, seconds_of, share_of_same
from gpu_report import Report, growth_of
from neighbours import best_device
from rounds import take_turns

NOTE = (
    "Sentences of 20 to 30 random tokens; all outputs have 32 tokens. Weights are random, and the "
    "same for all. Speed-up: the time of Transformers' search on our model divided by the row's. "
    "Same: outputs equal to ours; in half precision ties fall either way. MB: what a batch adds to "
    "the GPU's memory at its peak. Beam search has length penalty 0.6."
)
COLUMNS = ("type", "search", "batch", "contender", "sentences/s", "tokens/s", "ms a step")
COLUMNS += ("speed-up", "same, %", "MB")


class StaticCache(Inherited):
    """Transformers' searches with its static cache, for which it compiles the step on a GPU."""

    def __init__(self, folder: Path, dtype: str, device: str = "cpu") -> None:
        super().__init__(folder, dtype, device)
        self.model.generation_config.cache_implementation = "static"


CONTENDERS: dict[str, tuple[type[Generate], str]] = {
    "vanilla": (Generate, "this package's search"),
    "inherited": (Inherited, "Transformers' search"),
    "m2m100": (M2M100, "M2M100, the same weights"),
    "static": (StaticCache, "Transformers' search, static cache"),
}
OURS, REFERENCE = "vanilla", "inherited"
# Of the second table: compiling takes longest, and Transformers compiles no beam search.
BESIDE_STATIC = (OURS, REFERENCE, "static")


@dataclass(frozen=True)
class Sizes:
    """What is translated.

    Attributes:
        preset: Key of `PRESETS`.
        dtypes: Of the weights.
        batch_sizes: Sentences of a batch.
        beams: Hypotheses of a sentence.
        least: Sentences of a round, or as many as a batch has.
        rounds: Timed.
    """

    preset: str
    dtypes: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    beams: tuple[int, ...]
    least: int
    rounds: int


FULL = Sizes("base", ("bfloat16",), (1, 64, 512), (1, 4), least=2, rounds=3)
SMOKE = Sizes("tiny", ("float32",), (2,), (1, 4), least=2, rounds=1)


def run(report: Report, smoke: bool) -> None:
    """Fills both tables."""
    sizes = SMOKE if smoke else FULL
    table = report.table(f"Generation, {sizes.preset}", *COLUMNS)
    static = report.table(f"Generation, {sizes.preset}, greedy, with a static cache", *COLUMNS)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "random"
        write_random_model(sizes.preset, folder)
        folders = write_folders(folder, ["vanilla", "m2m100"], [], Path(scratch))
        for dtype in sizes.dtypes:
            contenders = {
                name: kind(folders.get(name, folder), dtype, best_device())
                for name, (kind, _) in CONTENDERS.items()
            }
            beside_static = {name: contenders[name] for name in BESIDE_STATIC}
            del contenders["static"]
            for size, num_beams in product(sizes.batch_sizes, sizes.beams):
                for cells in rows(report, sizes, contenders, (dtype, size, num_beams)):
                    report.add(table, *cells)
            for size in sizes.batch_sizes:
                for cells in rows(report, sizes, beside_static, (dtype, size, 1)):
                    report.add(static, *cells)


def rows(
    report: Report, sizes: Sizes, contenders: dict[str, Generate], setting: tuple[str, int, int]
) -> Iterator[list[Any]]:
    """A row for each contender that does not fail.

    Args:
        report: Takes the failures.
        sizes: Number of sentences and of rounds.
        contenders: By name.
        setting: Type, sentences of a batch, hypotheses of a sentence.
    """
    dtype, size, num_beams = setting
    options = Namespace(preset=sizes.preset, sentences=max(sizes.least, size))
    _, sources = read_sources(options, Path())
    task = make_task(options, [], sources, num_beams, size)
    search = "greedy" if num_beams == 1 else f"beam {num_beams}"
    results: dict[str, Result] = {}
    growths: dict[str, float | None] = {}

    def first_runs(name: str) -> None:
        # Compiling is over after two.
        contenders[name].run(task)
        _, outputs = contenders[name].run(task)
        growths[name] = growth_of(partial(contenders[name].run, task.largest_batch()))
        results[name] = Result([], outputs)

    for name in contenders:
        what = f"{dtype}, {search}, batch {size}, {CONTENDERS[name][1]}"
        report.attempt(what, partial(first_runs, name))
    timed = {name: partial(seconds_of, contenders[name], task) for name in results}
    for name, seconds in take_turns(timed, sizes.rounds).items():
        results[name].seconds.extend(seconds)
    for name in results:
        speeds = speeds_of(results[name], results.get(REFERENCE), task)
        same = 100 * share_of_same(results[name], results[OURS]) if OURS in results else None
        label = CONTENDERS[name][1]
        yield [dtype, search, size, label, *speeds, same, growths[name]]


def speeds_of(result: Result, reference: Result | None, task: Task) -> list[float | None]:
    """Sentences and tokens per second, milliseconds of a step, time of the reference by ours."""
    seconds = median(result.seconds)
    steps = sum(task.limits)
    return [
        len(result.outputs) / seconds,
        sum(map(len, result.outputs)) / seconds,
        1000 * seconds / steps,
        median(reference.seconds) / seconds if reference else None,
    ]
