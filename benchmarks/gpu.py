#!/usr/bin/env python
"""What one GPU makes of this package, in one call of at most eight minutes.

First a profile: how a training step, and a search, divide among kinds of kernels, and how long the
GPU waits for its host (`gaps`). Then training against M2M100, and translation against Transformers'
searches. All contenders take turns, in bfloat16. What fails or does not fit is named, the rest is
measured, and the status is 1 if anything failed.

Examples:
  python benchmarks/gpu.py --output results/gpu.md
  python benchmarks/gpu.py --smoke --output results/smoke.md
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from lab import Report, benchmark_parser, best_device, speed_cells, take_turns

Result = TypeVar("Result")
# Family, changed fields, and whether its layers are compiled.
TRAINED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "this package": ("vanilla", {}, False),
    "M2M100": ("m2m100", {}, False),
    "compiled layers": ("vanilla", {}, True),
}
SEARCHES = {
    "vanilla": "this package's search",
    "inherited": "Transformers' search",
    "m2m100": "M2M100, the same weights",
    "static": "Transformers' search, static cache",
}


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        batches: Preset and tokens of a batch, both sides, padding counted.
        updates: Batches of a round of training.
        vocabulary: Entries of the vocabulary.
        rounds: Timed rounds.
        search: Preset whose searches are measured.
        sentences: Sentences of a batch to translate.
        compiler: Backend that compiles.
    """

    batches: tuple[tuple[str, int], ...]
    updates: int
    vocabulary: int
    rounds: int
    search: str
    sentences: tuple[int, ...]
    compiler: str


# WMT's 37,000 is no multiple of 64.
FULL = Sizes(
    (("base", 50_000), ("tiny", 32_768), ("big", 50_000), ("tiny", 4096)),
    *(4, 37_000, 3, "base", (64, 1, 512), "inductor"),
)
SMOKE = Sizes((("tiny", 400),), 1, 200, 1, "tiny", (2,), "eager")


class Measurements:
    """A report that continues after failures, and begins nothing after its time.

    Args:
        report: Receives the tables.
        sizes: What is measured.
        minutes: Time after which no new measurement begins.
    """

    def __init__(self, report: Report, sizes: Sizes, minutes: float) -> None:
        self.report, self.sizes = report, sizes
        self.minutes, self.started = minutes, time.monotonic()
        self.failures: dict[str, str] = {}
        self.left_out: dict[str, str] = {}

    def attempt(self, what: str, work: Callable[..., Result], *arguments: Any) -> Result | None:
        """The result of a call; None if it fails or does not fit, which the report states."""
        import torch

        if time.monotonic() - self.started > 60 * self.minutes:
            self.left_out[what] = f"{self.minutes:g} minutes are over"
            return None
        try:
            return work(*arguments)
        except torch.OutOfMemoryError:
            self.left_out[what] = "out of memory"
        except Exception as error:
            traceback.print_exc()
            self.failures[what] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        return None

    def attempt_each(
        self, names: Iterable[str], where: str, work: Callable[..., Result], *arguments: Any
    ) -> dict[str, Result]:
        """Results of the calls with each name as first argument, without those that fail."""
        found = {name: self.attempt(f"{where}, {name}", work, name, *arguments) for name in names}
        return {name: result for name, result in found.items() if result is not None}

    def close(self) -> int:
        """Adds what failed and what was left out; returns the exit status."""
        for title, found in (("Failed", self.failures), ("Left out", self.left_out)):
            for what, reason in found.items():
                self.report.add(f"\n{title}: {what}: `{reason}`")
        return int(bool(self.failures))


def profile(measured: Measurements) -> None:
    """Tables of the kinds of kernels of a step of training, and of a search."""
    from kernels import profile_table

    sizes, report = measured.sizes, measured.report

    def profile_step(preset: str, tokens: int) -> None:
        step = trainer("this package", preset, tokens, sizes, 1).run
        profile_table(report, f"a step of {preset}, {tokens:,} tokens", step)

    def profile_search(sentences: int) -> None:
        with searchers(sizes.search, ["vanilla"]) as found:
            (call,) = found["vanilla"].calls(search_task(sentences, 1))
            profile_table(report, f"a greedy search of {sizes.search}, batch {sentences}", call)

    for preset, tokens in sizes.batches:
        measured.attempt(f"profile, {preset}, {tokens}", profile_step, preset, tokens)
    measured.attempt("profile of a search", profile_search, sizes.sentences[0])


def trainer(name: str, preset: str, tokens: int, sizes: Sizes, updates: int) -> Any:
    """A contender of `TRAINED` with batches of its own; the same for all."""
    from gpu_measures import wmt_like_batches
    from training import contender

    family, fields, is_compiled = TRAINED[name]
    cut = wmt_like_batches(tokens, updates, sizes.vocabulary)
    compiler = sizes.compiler if is_compiled else None
    return contender(family, fields, preset, sizes.vocabulary, cut, "bfloat16", 0.1, compiler)


def training(measured: Measurements) -> None:
    """Speed, memory and its estimate, and share of the peak, for each size."""
    import torch

    from gpu_measures import share_of_peak, training_flops
    from neighbours import padding_of, tokens_of

    sizes = measured.sizes
    columns = ("model", "tokens/s", "range", "speed", "ms an update", "MB", "estimated MB")
    for preset, tokens in sizes.batches:
        # After eight graphs of one function torch would compile no more.
        torch.compiler.reset()
        where = f"{preset}, {tokens} tokens"
        warm = measured.attempt_each(TRAINED, where, warm_up, preset, tokens, sizes)
        runs = {name: contender.run for name, (contender, _) in warm.items()}
        for name, times in take_turns(runs, sizes.rounds).items():
            (contender, growth), cut = warm[name], warm[name][0].cut
            if name == next(iter(warm)):
                padding = f"{100 * padding_of(cut):.1f} % padding, {sizes.vocabulary:,} entries"
                note = f"Training, {preset}, batches of {tokens:,} tokens, {padding}"
                measured.report.table(note, *columns, "share of the peak, %")
                first = times
            model = contender.model
            memory = None if growth is None else growth + 12e-6 * model.num_parameters()
            share = share_of_peak(training_flops(model.config, cut), median(times))
            costs = (1000 * median(times) / len(cut), memory, estimate(model, tokens), share)
            rates = speed_cells(tokens_of(cut), times, first)
            measured.report.row(name, *rates, *map(shown, costs))


def warm_up(name: str, preset: str, tokens: int, sizes: Sizes) -> tuple[Any, float | None]:
    """A contender that has run twice, and the megabytes that the second run added."""
    from gpu_measures import growth_of

    contender = trainer(name, preset, tokens, sizes, sizes.updates)
    contender.run()
    # Adam's state and the kernels are there from now on.
    return contender, growth_of(contender.run)


def estimate(model: Any, tokens: int) -> float | None:
    """Megabytes that `train` expects a batch to take, weights and Adam included; ours only."""
    import torch

    from vanilla_transformer import VanillaTransformerConfig
    from vanilla_transformer_tools.training.plan import estimated_memory

    if not isinstance(model.config, VanillaTransformerConfig):
        return None
    memory = estimated_memory(model, torch.device(best_device()), is_half=True)
    return (memory.fixed + tokens * memory.per_token) / 1e6


def shown(value: float | None) -> str:
    """Three digits, or whole thousands with commas; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@contextmanager
def searchers(preset: str, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The contenders of these names, with the same random weights."""
    from generation_contenders import CONTENDERS, write_folders, write_random_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "random"
        write_random_model(preset, folder)
        folders = write_folders(folder, ["vanilla", "m2m100"], [], Path(scratch))
        dtype = "bfloat16" if best_device() == "cuda" else "float32"
        found = {}
        for name in names:
            kind = CONTENDERS["inherited" if name == "static" else name]
            found[name] = kind(folders.get(name, folder), dtype, best_device())
            if name == "static":
                # Transformers compiles the step for it.
                found[name].model.generation_config.cache_implementation = "static"
        yield found


def search_task(sentences: int, num_beams: int) -> Any:
    """One batch of random sentences, with outputs of 32 tokens."""
    from generation_contenders import RANDOM_TARGET_TOKENS, Task, random_sources

    return Task([random_sources(sentences)], RANDOM_TARGET_TOKENS, True, num_beams)


def decoding(measured: Measurements) -> None:
    """Speed of greedy and beam search for each number of sentences."""
    from generation import seconds_for, share_of_same

    sizes = measured.sizes
    columns = ("search", "batch", "contender", "sentences/s", "range", "speed", "ms a step")
    note = f"Translation, {sizes.search}, outputs of 32 tokens, speed against this package"
    measured.report.table(note, *columns, "same, %")
    with searchers(sizes.search, SEARCHES) as contenders:

        def second_outputs(name: str, task: Any) -> list[list[int]]:
            # Compiling is over after two runs.
            contenders[name].run(task)
            return contenders[name].run(task)[1]

        for size, num_beams in product(sizes.sentences, (1, 4)):
            task = search_task(size, num_beams)
            search = "greedy" if num_beams == 1 else f"beam {num_beams}"
            # Transformers compiles no beam search.
            names = [name for name in SEARCHES if name != "static" or num_beams == 1]
            outputs = measured.attempt_each(names, f"{search}, {size}", second_outputs, task)
            runs = {name: partial(seconds_for, contenders[name], task) for name in outputs}
            seconds = take_turns(runs, sizes.rounds)
            for name, times in seconds.items():
                first = next(iter(seconds))
                same = 100 * share_of_same(outputs[name], outputs[first])
                rates = speed_cells(size, times, seconds[first], decimals=1)
                costs = (1000 * median(times) / task.limit, same)
                measured.report.row(search, size, SEARCHES[name], *rates, *map(shown, costs))


SECTIONS = {each.__name__: each for each in (profile, training, decoding)}


def main() -> int:
    """Runs the sections; returns the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="(all)"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="Nothing begins after (6).")
    parser.add_argument("--smoke", action="store_true", help="Toy sizes, also without a GPU.")
    options = parser.parse_args()

    if not options.smoke and best_device() == "cpu":
        print("gpu: torch finds no CUDA device. Toy sizes (--smoke) run on a CPU.", file=sys.stderr)
        return 2
    sizes = SMOKE if options.smoke else FULL
    measured = Measurements(Report(options.output), sizes, options.minutes)
    for section in options.sections:
        measured.attempt(section, SECTIONS[section], measured)
    return measured.close()


if __name__ == "__main__":
    sys.exit(main())
