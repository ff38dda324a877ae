"""What `--minutes` decides: from statistics of the text and a speed to a value for each option.

The rules look at the data once and search for nothing. docs/defaults.md has the evidence for each.
An option that the user gives is not changed, and later rules follow it.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainingArguments

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.tokenization_vanilla_transformer import TokenizerKind
from vanilla_transformer_tools.settings import CASINGS, PRESETS, PresetName, TrainSettings
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.corpus import sample
from vanilla_transformer_tools.training.machine import Speed
from vanilla_transformer_tools.training.options import model_fields

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
# A task of fewer words is a closed pattern, such as the commands of SCAN.
_WORDS_OF_A_PATTERN = 50
# One of so many pairs is in capitals, and one has a source in title case, from so many passes on.
_CASED_EVERY, _PASSES_OF_CASED = 50, 5
# Evaluations should take little of the time.
_VALIDATION_TOKENS_PER_MINUTE = 700
# With this number of updates, doubling the batch is better than doubling the updates.
_MANY_UPDATES = 8000
# On a GPU a batch of twice the tokens may take hardly longer.
_NEARLY_AS_MANY = 0.8
# Learning rates of `tiny` by optimizer: by the least tokens of a batch, and for a closed pattern.
_LEARNING_RATES = {
    "adam": ({32_768: 0.008, 4096: 0.004, 0: 0.003}, 0.002),
    "muon": ({2048: 0.008, 0: 0.006}, 0.004),
}


class _Device(NamedTuple):
    """Differences between a CPU and a GPU."""

    # Tokens of the largest batch that `--minutes` chooses.
    largest_batch: int
    # Work per token compared with `tiny`.
    costs: dict[str, float]


# On a CPU the number of weights in the layers decides. A GPU computes large matrices faster.
_CPU = _Device(4096, {"tiny": 1, "small": 24, "base": 34, "big": 136})
_GPU = _Device(32_768, {"tiny": 1, "small": 6, "base": 9, "big": 16})


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
    def kind(self) -> _Device:
        """The kind of the device; every one but a CPU counts as a GPU."""
        return _CPU if self.device == "cpu" else _GPU

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
        cost = self.kind.costs[preset] * size.weights / _size(preset, ()).weights
        fixed = _HOST_IN_TRAINING * self.seconds_per_batch * layers
        return 60 * self.minutes * _FOR_UPDATES / (fixed + tokens * cost / self.speed)

    def passes(self, chosen: Mapping[str, Any]) -> float:
        """Passes over the corpus that the minutes allow, with the largest batches."""
        tokens = chosen["max_tokens_per_batch"] or self.kind.largest_batch
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


def look(minutes: float, speed: Speed, arguments: TrainingArguments, pairs: Dataset) -> CorpusStats:
    """Looks at pairs from all over the corpus."""
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
    cases = [case for case, is_there in has_case.items() if is_there]
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
        source_case=cases[0] if len(cases) == 1 else "mixed",
        seconds_per_batch=speed.seconds_per_batch,
        batches_per_update=arguments.gradient_accumulation_steps,
    )


@dataclass(frozen=True)
class Decision:
    """A value that a rule chose for an option, and why."""

    option: str
    value: Any
    reason: str

    def __str__(self) -> str:
        name = "config dropout=" if self.option == "dropout" else f"{self.option} "
        words = self.value if isinstance(self.value, list) else [self.value]
        value = "" if self.value is True else " ".join(map(str, words))
        return f"chosen      --{f'{name}{value}'.strip()}: {self.reason}"


# An option, its value and the reason.
_Choice = tuple[str, Any, str]


def decide(
    stats: CorpusStats,
    settings: TrainSettings,
    tokenizers: TokenizerPair | None = None,
    given: Collection[str] = (),
) -> tuple[Decision, ...]:
    """Choices of the rules for the options that were not given.

    The run learns its own tokenizers, unless it takes saved ones over.
    """
    taken = _taken(settings, given)
    chosen, decisions = asdict(settings), []
    if tokenizers:
        # Of imported tokenizers the nearest options; those of both sides are the source's.
        source = tokenizers.source
        chosen |= {"tokenizer_kind": _kind(source), "vocab_size": len(source)}
    for rules in (_of_text, _of_model, _of_batches, _of_updates):
        # Each rule sees the values of those before it.
        for option, value, reason in rules(stats, chosen):
            if option not in taken:
                chosen[option] = value
                decisions.append(Decision(option, value, reason))
    return tuple(decisions)


def _of_text(stats: CorpusStats, chosen: Mapping[str, Any]) -> Iterator[_Choice]:
    """Rules for the tokenizer and what it decides on."""
    # Sentences in scripts without blanks have translations that consist of words.
    target_words = stats.words - stats.source_words
    target_characters = stats.characters - stats.source_characters
    are_symbols = target_words <= 1.5 or target_characters <= 4 * target_words
    kind, reason = "bpe", f"{stats.distinct_words:,} different words"
    if stats.distinct_words <= 1000 and stats.occurrences >= 20:
        kind = "word"
        reason = (
            f"only {stats.distinct_words:,} different words, each {stats.occurrences:,.0f} times"
        )
    elif stats.source_words <= 1.5 and stats.source_characters <= 20 and are_symbols:
        kind, reason = (
            "char",
            f"sources are single words of {stats.source_characters:.0f} characters",
        )
    yield "tokenizer_kind", kind, reason
    # What is copied keeps its case, and so do symbols, of which some may be in capitals.
    is_free = stats.source_case == "lower" or not stats.is_copied
    if stats.source_case != "mixed" and is_free and not chosen["symbols"]:
        yield "lowercase_sources", True, f"all sources are in {stats.source_case} case"
    kind = chosen["tokenizer_kind"]
    if kind in ("bpe", "unigram"):
        if stats.is_copied:
            reason = f"{stats.copied_words:.0%} of the long words are copied, by their pieces"
            yield "vocab_size", VOCABULARY_THAT_COPIES, reason
        else:
            sizes = {10_000: 4000, 1_000_000: 10_000, math.inf: 32_000}
            limit = next(limit for limit in sizes if stats.pairs < limit)
            of_limit = f", less than {limit:,}" if limit < math.inf else ""
            yield "vocab_size", sizes[limit], f"{stats.pairs:,} pairs{of_limit}"
    tokens = {"word": stats.long_words, "char": stats.long_characters}
    # BPE on identifiers and rare words has 3 characters a token.
    needed = 1 + tokens.get(kind, stats.long_characters // 3)
    if needed > chosen["max_length"]:
        reason = f"1 pair in 1,000 is longer than about {needed:,} tokens"
        yield "max_length", min(640, needed), reason
    if kind in ("word", "char"):
        reason = "tokens are symbols, so whole lines and single tokens count"
        yield "metrics", ["wer", "per"], reason


def _is_pattern(stats: CorpusStats, chosen: Mapping[str, Any]) -> bool:
    """Whether the words are so few that there is one right answer, to be learned exactly."""
    return stats.distinct_words < _WORDS_OF_A_PATTERN and chosen["tokenizer_kind"] == "word"


def _of_model(stats: CorpusStats, chosen: Mapping[str, Any]) -> Iterator[_Choice]:
    """Rules for the size, and against learning by heart."""
    passes = stats.passes({**chosen, "preset": "tiny"})
    size = "tiny", f"time for {passes:.1f} passes of the smallest size"
    for preset, pairs, least in (("small", 100_000, 15), ("base", 1_000_000, 5)):
        if stats.pairs >= pairs and stats.passes({**chosen, "preset": preset}) >= least:
            size = preset, f"time for {least} passes and more"
    yield "preset", size[0], f"{stats.pairs:,} pairs, and {size[1]}"
    yield "dropout", *_dropout(stats, chosen)
    has_case = stats.both_cases >= 0.5 and not (stats.is_copied or chosen["lowercase_sources"])
    # In a shorter run, plain text would pay for them.
    if (
        has_case
        and chosen["tokenizer_kind"] in ("bpe", "unigram")
        and stats.passes(chosen) >= _PASSES_OF_CASED
    ):
        reason = f"{stats.both_cases:.0%} of the pairs have capitals and small letters"
        yield from ((option, _CASED_EVERY, reason) for option in CASINGS)
    if _is_pattern(stats, chosen):
        yield "label_smoothing_factor", 0.0, "a closed pattern has one right answer"


def _dropout(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[float, str]:
    passes = stats.passes(chosen)
    if _is_pattern(stats, chosen):
        return 0.1, f"a closed pattern of {stats.distinct_words} words"
    if passes < 2:
        return 0.0, f"{passes:.1f} passes over the data: each pair is still new"
    if passes < 15:
        return 0.1, f"{passes:.1f} passes over the data are too few to learn them by heart"
    if stats.is_copied:
        return 0.1, f"{stats.copied_words:.0%} of the long words are copied, not learned by heart"
    if passes < 20 or chosen["tokenizer_kind"] in ("word", "char"):
        return 0.2, f"{passes:.0f} passes over {'symbols' if passes >= 20 else 'the data'}"
    return 0.3, f"{passes:.0f} passes over the data"


def _of_batches(stats: CorpusStats, chosen: Mapping[str, Any]) -> Iterator[_Choice]:
    """Rules for batches, optimizer and learning rate."""
    batch = 1024 if chosen["tokenizer_kind"] in ("word", "char") else 2048
    # The longest pair must fit.
    while batch < 2 * chosen["max_length"] or _is_worth_doubling(stats, chosen, batch):
        batch *= 2
    yield "max_tokens_per_batch", batch, f"about {stats.updates(chosen, batch):,.0f} updates"
    if chosen["preset"] != "tiny":
        return
    if stats.device == "cpu":
        yield "optimizer", "muon", "tiny on a CPU learns more in the same time than with Adam"
    optimizer, batch = chosen["optimizer"], chosen["max_tokens_per_batch"]
    rates, of_pattern = _LEARNING_RATES[optimizer]
    rate = next(rate for least, rate in rates.items() if batch >= least)
    reason = f"tiny with {optimizer} and batches of {batch:,} tokens"
    if _is_pattern(stats, chosen):
        rate, reason = of_pattern, f"a closed pattern, learned exactly, with {optimizer}"
    yield "learning_rate", rate, reason


def _is_worth_doubling(stats: CorpusStats, chosen: Mapping[str, Any], batch: int) -> bool:
    """Whether a batch of twice the tokens leaves enough updates, or takes hardly longer."""
    if 2 * batch > stats.kind.largest_batch:
        return False
    updates = stats.updates(chosen, 2 * batch)
    return updates >= min(_MANY_UPDATES, _NEARLY_AS_MANY * stats.updates(chosen, batch))


def _of_updates(stats: CorpusStats, chosen: Mapping[str, Any]) -> Iterator[_Choice]:
    """Rules for what is a share of the updates or of the time."""
    updates = stats.updates(chosen, chosen["max_tokens_per_batch"])
    most = PRESETS[chosen["preset"]].warmup_steps // 2
    steps = round(min(max(0.1 * updates, 50), most))
    yield "warmup_steps", steps, f"a tenth of about {updates:,.0f} updates, from 50 to {most:,}"
    yield "average_last", 1, "nothing to average out where the learning rate ends at 0"
    if chosen["validation"]:
        tokens = _VALIDATION_TOKENS_PER_MINUTE
        pairs = round(min(max(tokens * stats.minutes / stats.tokens_per_pair(chosen), 50), 500))
        reason = f"about {tokens} tokens for each minute, from 50 to 500 pairs"
        yield "max_validation_pairs", pairs, reason
    times = round(min(max(stats.minutes / 2, 3), 12))
    yield "eval_steps", max(1, round(updates / times)), f"about {times} checkpoints"


def decisions_on_record(
    previous: Mapping[str, Any], settings: TrainSettings, given: Collection[str]
) -> tuple[Decision, ...]:
    """Decisions in the record of a run that is resumed, but for options that are given now."""
    taken, recorded = _taken(settings, given), previous.get("decisions", [])
    return tuple(Decision(**each) for each in recorded if each["option"] not in taken)


def _taken(settings: TrainSettings, given: Collection[str]) -> set[str]:
    """Options that the rules do not change: the user's, and the ones that these decide."""
    taken = set(given) | {field.partition("=")[0] for field in settings.config}
    if settings.tokenizer:
        taken |= {"tokenizer_kind", "lowercase_sources", "vocab_size"}
    if taken & {"eval_strategy", "save_strategy", "save_steps"}:
        taken.add("eval_steps")
    if taken & {"bpe_dropout", "dataloader_persistent_workers"}:
        taken.update(CASINGS)
    if "optim" in taken:
        taken.add("optimizer")
    if "metric_for_best_model" in taken:
        taken.add("metrics")
    return taken


def _kind(tokenizer: PreTrainedTokenizerBase) -> TokenizerKind:
    if not tokenizer.is_fast:
        return "bpe"
    pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
    model = pipeline["model"]["type"]
    if model == "WordLevel":
        step = pipeline["pre_tokenizer"] or {}
        last = (step.get("pretokenizers") or [step])[-1]
        return "word" if last.get("pattern") == {"String": " "} else "char"
    return "unigram" if model == "Unigram" else "bpe"
