"""Statistics of text and machine for the rules of `--minutes`: a look at the pairs, and a speed."""

import timeit
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast
from datasets import Dataset
from transformers import TrainingArguments

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.settings import PRESETS, PresetName, TrainSettings
from vanilla_transformer_tools.training.corpus import sample
from vanilla_transformer_tools.training.options import dtype_of_products
from vanilla_transformer_tools.training.start import model_fields

# Number of pairs, from all over the corpus, that are examined; all of them are counted.
EXAMINED_PAIRS = 100_000
_ROWS_AT_A_TIME = 1000
# Size of a vocabulary with which names are copied piece by piece.
VOCABULARY_THAT_COPIES = 2000
# Targets that repeat this share of their sources' long words are mostly copied, such as code.
_SHARE_THAT_COPIES = 0.25
# Share of the minutes that is left for updates; the rest is reading, evaluating and saving.
_FOR_UPDATES = 0.85
# Optimizer and Trainer keep the host busy too: the fixed time of a batch in training, compared with
# that of a forward and backward pass.
_HOST_IN_TRAINING = 2.5


class _Device(NamedTuple):
    """Differences between a CPU and a GPU."""

    # Tokens of the largest batch that `--minutes` chooses.
    largest_batch: int
    # Pairs of 40 tokens in each batch that is timed; two batches show a fixed time.
    timed_pairs: tuple[int, ...]
    # Work per token compared with `tiny`.
    costs: dict[str, float]


# On a CPU the number of weights in the layers decides. A GPU computes large matrices faster.
_CPU = _Device(4096, (64,), {"tiny": 1, "small": 24, "base": 34, "big": 136})
_GPU = _Device(32_768, (64, 1024), {"tiny": 1, "small": 6, "base": 9, "big": 16})


def _device(name: str) -> _Device:
    """The kind of a type of device; every one but a CPU counts as a GPU."""
    return _CPU if name == "cpu" else _GPU


class Speed(NamedTuple):
    """How fast `tiny` trains: seconds of a batch = seconds_per_batch + tokens / tokens_per_second.

    Attributes:
        tokens_per_second: Source and target together.
        seconds_per_batch: Fixed time, for launching kernels on a GPU; 0 on a CPU.
    """

    tokens_per_second: float
    seconds_per_batch: float = 0.0


@dataclass(frozen=True)
class CorpusStats:
    """Statistics of text and machine for the rules.

    Attributes:
        minutes: Length of the run.
        speed: Tokens per second with which `tiny` trains here, see `Speed`.
        device: Type of the device.
        pairs: Number of pairs.
        source_words: Mean number of words, separated by blanks, of a source.
        words: Mean number of words of source and target together.
        source_characters: Mean number of characters of a source.
        characters: Mean number of characters of source and target together.
        long_words: Words of the longer side, which 999 of 1,000 pairs do not exceed.
        long_characters: Characters of the longer side, which 999 of 1,000 pairs do not exceed.
        distinct_words: Number of different words of both sides.
        occurrences: Mean number of times that a word occurs.
        copied_words: Share of the words of four letters and more of a target that its source has.
        both_cases: Share of the pairs with small and capital letters on both sides.
        source_case: Case of all letters of the sources, "lower" or "upper"; else "mixed".
        seconds_per_batch: Fixed time of a batch, see `Speed`.
        batches_per_update: Those whose gradients are accumulated.
    """

    minutes: float
    speed: float
    device: str
    pairs: int
    source_words: float
    words: float
    source_characters: float
    characters: float
    long_words: int
    long_characters: int
    distinct_words: int
    occurrences: float
    copied_words: float
    both_cases: float = 0.0
    source_case: str = "mixed"
    seconds_per_batch: float = 0.0
    batches_per_update: int = 1

    @property
    def is_copied(self) -> bool:
        """Whether much of the targets is copied, piece by piece, and not learned by heart."""
        return self.copied_words >= _SHARE_THAT_COPIES

    def tokens_per_pair(self, chosen: Mapping[str, Any]) -> float:
        """Tokens of a pair, its two ends included."""
        tokens = {"word": self.words, "char": self.characters}
        # A small vocabulary has shorter pieces.
        characters_of_a_piece = 3 if chosen["vocab_size"] <= VOCABULARY_THAT_COPIES else 4
        return 2 + tokens.get(chosen["tokenizer_kind"], self.characters / characters_of_a_piece)

    def batches(self, chosen: Mapping[str, Any], tokens: float) -> float:
        """Number of batches of `tokens` tokens that fit the minutes, for the chosen size."""
        preset = chosen["preset"]
        size = _size(preset, tuple(chosen["config"]))
        layers = size.layers / _size("tiny", ()).layers
        cost = _device(self.device).costs[preset] * size.weights / _size(preset, ()).weights
        fixed = _HOST_IN_TRAINING * self.seconds_per_batch * layers
        return 60 * self.minutes * _FOR_UPDATES / (fixed + tokens * cost / self.speed)

    @property
    def largest_batch(self) -> int:
        """Tokens of the largest batch for this device."""
        return _device(self.device).largest_batch

    def passes(self, chosen: Mapping[str, Any]) -> float:
        """Passes over the corpus that the minutes allow, with the largest batches."""
        tokens = chosen["max_tokens_per_batch"] or self.largest_batch
        pairs = tokens * self.batches(chosen, tokens) / self.tokens_per_pair(chosen)
        return pairs / self.pairs

    def updates(self, chosen: Mapping[str, Any], batch: int) -> float:
        """Updates that the minutes allow, with batches of `batch` tokens."""
        tokens = (2 if chosen["r_drop"] else 1) * batch
        return self.batches(chosen, tokens) / self.batches_per_update


class _Size(NamedTuple):
    """Number of layers of both stacks, and of the weights in them."""

    layers: int
    weights: int


@cache
def _size(preset: PresetName, config: tuple[str, ...]) -> _Size:
    """Size of a preset with assignments of `--config`."""
    fields = model_fields(TrainSettings(preset=preset, config=list(config)))
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    weights = sum(weight.numel() for layer in layers for weight in layer.parameters())
    return _Size(len(layers), weights)


def measure(minutes: float, arguments: TrainingArguments, pairs: Dataset) -> CorpusStats:
    """Looks at pairs from all over the corpus, and trains on this machine for some seconds."""
    speed = training_speed(arguments)
    words: Counter[str] = Counter()
    lengths, copied, long_words, both_cases = [], 0, 0, 0
    has_case = {"lower": False, "upper": False}
    for rows in pairs.select(sample(len(pairs), EXAMINED_PAIRS)).iter(_ROWS_AT_A_TIME):
        for source, target in zip(rows["source"], rows["target"], strict=True):
            source_words, target_words = source.split(), target.split()
            words.update(chain(source_words, target_words))
            has_case["lower"] |= source != source.upper()
            has_case["upper"] |= source != source.lower()
            both_cases += all(text not in (text.lower(), text.upper()) for text in (source, target))
            lengths.append((len(source_words), len(target_words), len(source), len(target)))
            long = {word for word in target_words if len(word) >= 4}
            copied += len(long.intersection(source_words))
            long_words += len(long)
    table = np.array(lengths)
    means = table.mean(axis=0)
    return CorpusStats(
        minutes=minutes,
        speed=speed.tokens_per_second,
        device=arguments.device.type,
        pairs=len(pairs),
        source_words=means[0],
        words=means[0] + means[1],
        source_characters=means[2],
        characters=means[2] + means[3],
        long_words=int(np.quantile(table[:, :2].max(axis=1), 0.999)),
        long_characters=int(np.quantile(table[:, 2:].max(axis=1), 0.999)),
        distinct_words=len(words),
        occurrences=words.total() / max(1, len(words)),
        copied_words=copied / max(1, long_words),
        both_cases=both_cases / len(lengths),
        source_case=_only(has_case),
        seconds_per_batch=speed.seconds_per_batch,
        batches_per_update=arguments.gradient_accumulation_steps,
    )


def _only(has_case: Mapping[str, bool]) -> str:
    """The case that text has, if it is only one."""
    cases = [case for case, is_there in has_case.items() if is_there]
    return cases[0] if len(cases) == 1 else "mixed"


def training_speed(arguments: TrainingArguments) -> Speed:
    """How fast `tiny` trains here, in all processes together.

    The optimizer is left out. Process 0 decides, so that all choose alike.
    """
    device, dtype = arguments.device, dtype_of_products(arguments)
    with torch.random.fork_rng():
        config = VanillaTransformerConfig(**PRESETS["tiny"].config(), vocab_size=10_000)
        model = VanillaTransformerForConditionalGeneration(config).to(device).train()
        batches = [
            torch.randint(10, 10_000, (pairs, 20), device=device)
            for pairs in _device(device.type).timed_pairs
        ]
        seconds = [_seconds_of_batch(model, ids, dtype) for ids in batches]
    if device.type == "cuda":
        # What the run takes and may take is measured later.
        del model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = _line_through([2 * ids.numel() for ids in batches], seconds)
    speed = Speed(*broadcast(torch.tensor(measured, device=device)).tolist())
    return speed._replace(tokens_per_second=arguments.world_size * speed.tokens_per_second)


def _seconds_of_batch(
    model: VanillaTransformerForConditionalGeneration, ids: torch.Tensor, dtype: torch.dtype
) -> float:
    """Median time of a forward and backward pass, after one that warms up."""
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def step() -> None:
        with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
            loss = model(**batch).loss
        loss.backward()
        # Reading the value waits for the device.
        loss.item()

    return float(np.median(timeit.repeat(step, number=1, repeat=6)[1:]))


def _line_through(tokens: Sequence[int], seconds: Sequence[float]) -> Speed:
    """The speed that explains the times of one batch, or of a small and a large one."""
    if len(tokens) == 1:
        return Speed(tokens[0] / seconds[0])
    # At least a tenth of the larger time is for its tokens, whatever the clock says.
    growth = max(seconds[1] - seconds[0], 0.1 * seconds[1])
    per_token = growth / (tokens[1] - tokens[0])
    return Speed(1 / per_token, max(0.0, seconds[0] - per_token * tokens[0]))
