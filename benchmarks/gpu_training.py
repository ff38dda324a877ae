"""Training of base and big on batches like WMT's: speed, memory, and share of the GPU's peak."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, PreTrainedConfig, PreTrainedModel

from gpu_report import Report, bf16_peak, growth_of
from neighbours import Training, best_device, padding_of, tokens_of
from rounds import take_turns
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.training.batch_size import estimated_memory

NOTE = (
    "Forward, backward and Adam in bfloat16 by autocast, on the same batches in turn. Tokens of "
    "both sides do not count padding. MB: weights, Adam's state, and what a round adds to them at "
    "its peak; estimated MB: what `train` expects of the same batch when it chooses the size of "
    "batches. Share: floating-point operations of the real tokens, see `training_flops`, against "
    "the device's dense bfloat16 peak."
)
COLUMNS = ("size", "model", "tokens/s", "slowest", "fastest", "ms an update")
COLUMNS += ("against M2M100", "MB", "estimated MB", "share of the peak, %")
# Family, changed fields, and whether its layers are compiled.
CONTENDERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "vanilla": ("vanilla", {}, False),
    "vanilla, no padding": ("vanilla", {"attn_implementation": "varlen"}, False),
    "M2M100": ("m2m100", {}, False),
    "vanilla, compiled layers": ("vanilla", {}, True),
    "vanilla, no padding, compiled layers": ("vanilla", {"attn_implementation": "varlen"}, True),
}
REFERENCE = "M2M100"
# Pairs of WMT14 en-de have some 28 tokens a side with 37,000 BPE entries: a log-normal
# distribution, and targets somewhat longer than sources.
MEDIAN_LENGTH, SPREAD, LONGEST = 23.0, 0.65, 250
RATIO, RATIO_SPREAD = 1.05, 0.2
# So many times the batches needed are drawn, so that pairs of similar length are found.
POOL = 20


@dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
        presets: Keys of `PRESETS`.
        contenders: Keys of `CONTENDERS`.
        vocabulary: Number of entries.
        tokens: Of a batch, both sides, padding counted.
        batches: Of a round.
        rounds: Timed.
        compiler: Backend of those that are compiled.
        changes: Fields of the config.
    """

    presets: tuple[str, ...]
    contenders: tuple[str, ...]
    vocabulary: int
    tokens: int
    batches: int
    rounds: int
    compiler: str
    changes: dict[str, Any] = field(default_factory=dict)


ALL = tuple(CONTENDERS)
FULL = Sizes(("base", "big"), ALL, 37_000, 50_000, batches=8, rounds=4, compiler="inductor")
ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}
# Generating C++ takes minutes.
SMOKE = Sizes(("tiny",), ALL, 200, 400, batches=1, rounds=1, compiler="eager", changes=ONE_LAYER)


def wmt_like_batches(sizes: Sizes) -> list[BatchEncoding]:
    """Batches of random tokens in sentences as long as WMT's."""
    draw = np.random.default_rng(0)
    pairs = int(POOL * sizes.batches * sizes.tokens / MEDIAN_LENGTH / 2)
    source = draw.lognormal(np.log(MEDIAN_LENGTH), SPREAD, pairs)
    target = source * draw.lognormal(np.log(RATIO), RATIO_SPREAD, pairs)
    longest = min(LONGEST, sizes.tokens // 4)
    lengths = np.stack((source, target), axis=1).round().astype(int).clip(2, longest)
    sampler = TokenBatchSampler(lengths, sizes.tokens, seed=0)
    generator = torch.Generator().manual_seed(0)

    def padded(lengths: Iterable[int], filler: int) -> torch.Tensor:
        rows = [
            torch.randint(4, sizes.vocabulary, (int(length),), generator=generator)
            for length in lengths
        ]
        for row in rows:
            row[-1] = 2
        return pad_sequence(rows, batch_first=True, padding_value=filler)

    cut = []
    for indices in islice(sampler, sizes.batches):
        input_ids = padded(lengths[indices, 0], 0)
        labels = padded(lengths[indices, 1], -100)
        mask = (input_ids != 0).long()
        cut.append(
            BatchEncoding({"input_ids": input_ids, "attention_mask": mask, "labels": labels})
        )
    return cut


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
    width, vocabulary = config.d_model, config.vocab_size
    total = 0
    for batch in cut:
        source = batch["attention_mask"].sum(1).double()
        target = (batch["labels"] != -100).sum(1).double()
        attention = 4 * width**2
        encoder = source * (attention + 2 * width * config.encoder_ffn_dim)
        encoder += 2 * source**2 * width
        decoder = target * (attention + 2 * width * config.decoder_ffn_dim)
        decoder += 2 * target**2 * width
        decoder += 2 * width**2 * (source + target) + 2 * source * target * width
        products = config.encoder_layers * encoder + config.decoder_layers * decoder
        products += target * width * vocabulary
        total += round(float(products.sum()))
    # A multiplication and an addition; the backward pass has two products for each.
    return 3 * 2 * total


def run(report: Report, smoke: bool) -> None:
    """Fills a table."""
    compare(report, SMOKE if smoke else FULL)


def compare(report: Report, sizes: Sizes) -> None:
    """A table of all contenders with batches of one size."""
    cut = wmt_like_batches(sizes)
    title = f"{sizes.batches} batches of {sizes.tokens:,} tokens, {100 * padding_of(cut):.1f} %"
    table = report.table(f"{title} padding, {sizes.vocabulary:,} entries", *COLUMNS)
    for preset in sizes.presets:
        # After eight graphs of one function torch would compile no more.
        torch.compiler.reset()
        warm = {}
        for name in sizes.contenders:
            first_run = partial(warm_up, preset, name, sizes, cut)
            if found := report.attempt(f"{preset}, {sizes.tokens:,} tokens, {name}", first_run):
                warm[name] = found
        seconds = take_turns({name: one.run for name, (one, _) in warm.items()}, sizes.rounds)
        for name, times in seconds.items():
            contender, megabytes = warm[name]
            against = median(seconds[REFERENCE]) / median(times) if REFERENCE in seconds else None
            flops = training_flops(contender.model.config, cut)
            costs = megabytes, expected_megabytes(contender.model, sizes.tokens)
            share = share_of_peak(flops, median(times))
            report.add(table, preset, name, *speeds(cut, times), against, *costs, share)


def warm_up(
    preset: str, name: str, sizes: Sizes, cut: list[BatchEncoding]
) -> tuple[Training, float | None]:
    """A contender that has run twice, and the megabytes that it takes."""
    family, fields, is_compiled = CONTENDERS[name]
    compiler = sizes.compiler if is_compiled else None
    setting = (preset, sizes.vocabulary, "bfloat16", 0.1, compiler, cut)
    contender = Training(family, sizes.changes | fields, *setting)
    contender.run()
    # Adam's state and the kernels are there from now on.
    return contender, with_state(growth_of(contender.run), contender)


def speeds(cut: list[BatchEncoding], seconds: list[float]) -> tuple[float, float, float, float]:
    """Tokens per second in the median, slowest and fastest round; milliseconds of an update."""
    tokens = tokens_of(cut)
    rates = (tokens / each for each in (median(seconds), max(seconds), min(seconds)))
    return *rates, 1000 * median(seconds) / len(cut)


def with_state(growth: float | None, contender: Training) -> float | None:
    """Megabytes of weights and of Adam's two moments, plus the growth."""
    if growth is None:
        return None
    return 12e-6 * contender.model.num_parameters() + growth


def expected_megabytes(model: PreTrainedModel, tokens: int) -> float | None:
    """What `train` expects a batch to take, weights and Adam's state included; ours only."""
    if not isinstance(model.config, VanillaTransformerConfig):
        return None
    memory = estimated_memory(model, torch.device(best_device()), is_half=True)
    return (memory.fixed + tokens * memory.per_token) / 1e6


def share_of_peak(flops: int, seconds: float) -> float | None:
    """Percent of the device's peak; None if that is not known."""
    peak = bf16_peak(torch.cuda.get_device_name()) if best_device() == "cuda" else None
    return 100 * flops / seconds / (1e12 * peak) if peak else None
