#!/usr/bin/env python
"""What one GPU makes of this package, in one call of some minutes.

First a profile: how a training step, and a search, divide among kinds of kernels, and how long the
GPU waits for its host (`gaps`). Then training against M2M100, and translation against Transformers'
searches. All contenders take turns, in bfloat16. What fails or does not fit is named, the rest is
measured, and the status is 1 if anything failed.

Examples:
  python benchmarks/gpu.py --output results/gpu.md
  python benchmarks/gpu.py --smoke --output results/smoke.md
"""

import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedConfig

from generation import (
    CONTENDERS,
    RANDOM_TARGET_TOKENS,
    Task,
    prepare,
    random_sources,
    seconds_for,
    share_of_same,
    write_random_model,
)
from kernels import profile_table
from lab import Report, benchmark_parser, best_device, speed_cells, take_turns, wait_for_gpu
from neighbours import Training, padding_of, random_batches, tokens_of
from training import contender
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.training.plan import estimated_memory

Result = TypeVar("Result")
# Family, and whether its layers are compiled.
TRAINED = {
    "this package": ("vanilla", False),
    "M2M100": ("m2m100", False),
    "compiled layers": ("vanilla", True),
}
SEARCHES = {
    "vanilla": "this package's search",
    "inherited": "Transformers' search",
    "m2m100": "M2M100, the same weights",
    "static": "Transformers' search, static cache",
}
# Dense bfloat16 products with float32 sums, in TFLOP/s, from the makers' data sheets. The first
# name that a device's name contains as words decides.
BF16_PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H200 NVL": 835,
    "H100": 989,
    "H200": 989,
    "B200": 2250,
    "A100": 312,
    "L4": 121,
    "RTX 4090": 165,
}
# Pairs of WMT14 en-de have some 28 tokens a side with 37,000 BPE entries: a log-normal
# distribution, and targets somewhat longer than sources.
MEDIAN_LENGTH, SPREAD, LONGEST = 23.0, 0.65, 250
RATIO, RATIO_SPREAD = 1.05, 0.2
# So many times the batches needed are drawn, so that pairs of similar length are found.
POOL = 20


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


class Measurements(Report):
    """A report that continues after failures, which it names at its end."""

    def __init__(self, output: Path | None, sizes: Sizes) -> None:
        super().__init__(output)
        self.sizes, self.status = sizes, 0
        self.notes: list[str] = []

    def attempt(self, what: str, work: Callable[..., Result], *arguments: Any) -> Result | None:
        """The result of a call; None if it fails or does not fit."""
        try:
            return work(*arguments)
        except torch.OutOfMemoryError:
            self.notes.append(f"\nLeft out: {what}: out of memory")
        except Exception as error:
            traceback.print_exc()
            self.status = 1
            reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
            self.notes.append(f"\nFailed: {what}: `{reason}`")
        return None

    def attempt_each(
        self, names: Iterable[str], where: str, work: Callable[..., Result], *arguments: Any
    ) -> dict[str, Result]:
        """Results of the calls with each name as first argument, without those that fail."""
        found = {name: self.attempt(f"{where}, {name}", work, name, *arguments) for name in names}
        return {name: result for name, result in found.items() if result is not None}


def profile(report: Measurements) -> None:
    """Tables of the kinds of kernels of a step of training, and of a search."""
    sizes = report.sizes

    def profile_step(preset: str, tokens: int) -> None:
        step = trainer("this package", preset, tokens, sizes, 1).run
        profile_table(report, f"a step of {preset}, {tokens:,} tokens", step)

    def profile_search(sentences: int) -> None:
        with searchers(sizes.search, ["vanilla"]) as found:
            (call,) = found["vanilla"].calls(search_task(sentences, 1))
            profile_table(report, f"a greedy search of {sizes.search}, batch {sentences}", call)

    for preset, tokens in sizes.batches:
        report.attempt(f"profile, {preset}, {tokens}", profile_step, preset, tokens)
    report.attempt("profile of a search", profile_search, sizes.sentences[0])


def trainer(name: str, preset: str, tokens: int, sizes: Sizes, updates: int) -> Training:
    """A contender of `TRAINED` with batches of its own; the same for all."""
    family, is_compiled = TRAINED[name]
    cut = wmt_like_batches(tokens, updates, sizes.vocabulary)
    compiler = sizes.compiler if is_compiled else None
    return contender(family, preset, sizes.vocabulary, cut, "bfloat16", 0.1, compiler)


def wmt_like_batches(tokens: int, count: int, vocab_size: int) -> list[BatchEncoding]:
    """Batches of random tokens in sentences as long as WMT's.

    Args:
        tokens: Most tokens of a batch, both sides, padding counted.
        count: Number of batches.
        vocab_size: Entries of the vocabulary.
    """
    draw = np.random.default_rng(0)
    pairs = int(POOL * count * tokens / MEDIAN_LENGTH / 2)
    source = draw.lognormal(np.log(MEDIAN_LENGTH), SPREAD, pairs)
    target = source * draw.lognormal(np.log(RATIO), RATIO_SPREAD, pairs)
    longest = min(LONGEST, tokens // 4)
    lengths = np.stack((source, target), axis=1).round().astype(int).clip(2, longest)
    sampler = TokenBatchSampler(lengths, tokens, seed=0)
    return random_batches(lengths, islice(sampler, count), vocab_size)


def training(report: Measurements) -> None:
    """Speed, memory and its estimate, and share of the peak, for each size."""
    sizes = report.sizes
    columns = ("model", "tokens/s", "range", "speed", "ms an update", "MB", "estimated MB")
    for preset, tokens in sizes.batches:
        # After eight graphs of one function torch would compile no more.
        torch.compiler.reset()
        where = f"{preset}, {tokens} tokens"
        warm = report.attempt_each(TRAINED, where, warm_up, preset, tokens, sizes)
        runs = {name: contender.run for name, (contender, _) in warm.items()}
        for name, times in take_turns(runs, sizes.rounds).items():
            (contender, growth), cut = warm[name], warm[name][0].cut
            if name == next(iter(warm)):
                padding = f"{100 * padding_of(cut):.1f} % padding, {sizes.vocabulary:,} entries"
                note = f"Training, {preset}, batches of {tokens:,} tokens, {padding}"
                report.table(note, *columns, "share of the peak, %")
                first = times
            model = contender.model
            memory = None if growth is None else growth + 12e-6 * model.num_parameters()
            share = share_of_peak(training_flops(model.config, cut), median(times))
            costs = (1000 * median(times) / len(cut), memory, estimate(model, tokens), share)
            rates = speed_cells(tokens_of(cut), times, first)
            report.row(name, *rates, *map(shown, costs))


def warm_up(name: str, preset: str, tokens: int, sizes: Sizes) -> tuple[Training, float | None]:
    """A contender that has run twice, and what the second run added to the GPU's memory, in MB."""
    contender = trainer(name, preset, tokens, sizes, sizes.updates)
    contender.run()
    if best_device() == "cpu":
        return contender, None
    # Adam's state and the kernels are there from now on.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    contender.run()
    wait_for_gpu()
    return contender, (torch.cuda.max_memory_allocated() - before) / 1e6


def estimate(model: Any, tokens: int) -> float | None:
    """Megabytes that `train` expects a batch to take, weights and Adam included; ours only."""
    if not isinstance(model.config, VanillaTransformerConfig):
        return None
    memory = estimated_memory(model, torch.device(best_device()), is_half=True)
    return (memory.fixed + tokens * memory.per_token) / 1e6


def training_flops(config: PreTrainedConfig, cut: list[BatchEncoding]) -> int:
    """Floating-point operations of matrix products in a forward and a backward pass.

    Only real tokens count. A product of a row with a matrix of n parameters costs 2 n operations
    forward and 4 n backward. With S and T tokens a sentence, widths D and F, and V entries:

    - encoder, a layer: S (4 D^2 + 2 D F) parameters' products and two products [S, S, D];
    - decoder, a layer: T (4 D^2 + 2 D F) and two products [T, T, D] of self-attention; T 2 D^2 and
      S 2 D^2 (keys and values) and two products [T, S, D] of cross-attention;
    - output projection: T D V.

    As is usual, the causal mask is not deducted, and neither softmax, norms, dropout, the gather of
    embeddings nor the optimizer count.
    """
    width, total = config.d_model, 0
    for batch in cut:
        source = batch["attention_mask"].sum(1).double()
        target = (batch["labels"] != -100).sum(1).double()
        encoder = source * (4 * width**2 + 2 * width * config.encoder_ffn_dim)
        encoder += 2 * source**2 * width
        decoder = target * (4 * width**2 + 2 * width * config.decoder_ffn_dim)
        decoder += 2 * target**2 * width
        decoder += 2 * width**2 * (source + target) + 2 * source * target * width
        products = config.encoder_layers * encoder + config.decoder_layers * decoder
        total += round(float((products + target * width * config.vocab_size).sum()))
    # A multiplication and an addition; the backward pass has two products for each.
    return 3 * 2 * total


def share_of_peak(flops: int, seconds: float) -> float | None:
    """Percent of the device's dense bfloat16 peak; None if that is not known."""
    device = torch.cuda.get_device_name() if best_device() == "cuda" else ""
    for name, peak in BF16_PEAKS.items():
        if re.search(rf"\b{name}\b", device):
            return 100 * flops / seconds / (1e12 * peak)
    return None


def shown(value: float | None) -> str:
    """Three digits, or whole thousands with commas; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@contextmanager
def searchers(preset: str, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The contenders of these names, with the same random weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "random"
        write_random_model(preset, folder)
        folders = prepare(folder, ["m2m100"], [], Path(scratch))
        dtype = "bfloat16" if best_device() == "cuda" else "float32"
        found = {}
        for name in names:
            kind = CONTENDERS["inherited" if name == "static" else name]
            found[name] = kind(folders.get(name, folder), dtype, best_device())
            if name == "static":
                # Transformers compiles the step for it.
                found[name].model.generation_config.cache_implementation = "static"
        yield found


def search_task(sentences: int, num_beams: int) -> Task:
    """One batch of random sentences, with outputs of 32 tokens."""
    return Task([random_sources(sentences)], RANDOM_TARGET_TOKENS, True, num_beams)


def decoding(report: Measurements) -> None:
    """Speed of greedy and beam search for each number of sentences."""
    sizes = report.sizes
    columns = ("search", "batch", "contender", "sentences/s", "range", "speed", "ms a step")
    note = f"Translation, {sizes.search}, outputs of 32 tokens, speed against this package"
    report.table(note, *columns, "same, %")
    with searchers(sizes.search, SEARCHES) as contenders:

        def second_outputs(name: str, task: Task) -> list[list[int]]:
            # Compiling is over after two runs.
            contenders[name].run(task)
            return contenders[name].run(task)[1]

        for size, num_beams in product(sizes.sentences, (1, 4)):
            task = search_task(size, num_beams)
            search = "greedy" if num_beams == 1 else f"beam {num_beams}"
            # Transformers compiles no beam search.
            names = [name for name in SEARCHES if name != "static" or num_beams == 1]
            outputs = report.attempt_each(names, f"{search}, {size}", second_outputs, task)
            runs = {name: partial(seconds_for, contenders[name], task) for name in outputs}
            seconds = take_turns(runs, sizes.rounds)
            for name, times in seconds.items():
                first = next(iter(seconds))
                same = 100 * share_of_same(outputs[name], outputs[first])
                rates = speed_cells(size, times, seconds[first], decimals=1)
                costs = (1000 * median(times) / task.limit, same)
                report.row(search, size, SEARCHES[name], *rates, *map(shown, costs))


SECTIONS = {each.__name__: each for each in (profile, training, decoding)}


def main() -> int:
    """Runs the sections; returns the exit status."""
    parser = benchmark_parser(__doc__)
    choices = {"nargs": "+", "choices": SECTIONS, "default": list(SECTIONS)}
    parser.add_argument("--sections", **choices, help="(all)")
    parser.add_argument("--smoke", action="store_true", help="Toy sizes, also without a GPU.")
    options = parser.parse_args()
    if not options.smoke and best_device() == "cpu":
        parser.error("torch finds no CUDA device; toy sizes (--smoke) run on a CPU")
    report = Measurements(options.output, SMOKE if options.smoke else FULL)
    for section in options.sections:
        report.attempt(section, SECTIONS[section], report)
    for note in report.notes:
        report.add(note)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
