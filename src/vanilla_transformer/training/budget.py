"""What `train --minutes` decides: a table of rules from data and speed to options, with reasons.

The rules look at the data once and search for nothing. docs/defaults.md has the evidence for each.
An option that the user gives is left alone, and later rules follow it.
"""

import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast
from transformers import TrainingArguments

from vanilla_transformer.model_folder import RUN_FILE, read_object
from vanilla_transformer.modeling.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.threads import IdleCores
from vanilla_transformer.tokenization.composing_vanilla_transformer import DECOMPOSED_FORMS
from vanilla_transformer_cli.settings import PRESETS, TrainSettings

Settings = TypeVar("Settings", bound=TrainSettings)

# Only so many pairs, from the beginning, are looked at; all of them are counted.
EXAMINED_PAIRS = 100_000
# Share of the minutes that is left for updates; the rest is reading, evaluating and saving.
_FOR_UPDATES = 0.85
# Work per token compared with `tiny`, by the number of weights in the layers.
_COST = {"tiny": 1, "small": 24, "base": 34, "big": 136}
# A task of fewer words is a closed pattern.
_WORDS_OF_A_PATTERN = 50
# Evaluations should take little of the time.
_VALIDATION_TOKENS_PER_MINUTE = 700
# Size of a vocabulary with which names are copied piece by piece.
_VOCABULARY_THAT_COPIES = 2000
_LARGEST_BATCH = {"cpu": 4096, "cuda": 32_768}

# The saved model of --tokenizer decides these.
_OF_TOKENIZERS = {
    *("tokenizer_kind", "unicode_form", "vocab_size", "separate_vocabularies", "pretokenized"),
}


@dataclass(frozen=True)
class Facts:
    """What the rules know of data and machine.

    Attributes:
        minutes: Length of the run.
        speed: Tokens per second, source and target together, with which `tiny` trains here.
        device: Type of the device.
        pairs: Number of pairs.
        source_words: Mean number of words, separated by blanks, of a source.
        words: Mean number of words of source and target together.
        source_characters: Mean number of characters of a source.
        characters: Mean number of characters of source and target together.
        long_words: Words of the longer side, which 999 of 1,000 pairs do not exceed.
        long_characters: Characters of the longer side, likewise.
        distinct_words: Number of different words of both sides.
        occurrences: Mean number of times that a word occurs.
        shared_letters: Share of the letters of the targets that sources have too, 0 to 1.
        copied_words: Share of the words of four letters and more of a target that its source has.
        spaced_stops: Share of commas and full stops after a blank, 0 to 1.
        alphabet: Number of different characters of both sides.
        alphabet_apart: The same of text in NFD.
        growth_apart: Characters of text in NFD for each one as it is.
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
    shared_letters: float
    copied_words: float
    spaced_stops: float
    alphabet: int
    alphabet_apart: int
    growth_apart: float

    def growth(self, chosen: Mapping[str, Any]) -> float:
        """How many times as many characters text has in the Unicode form of the tokenizer."""
        return self.growth_apart if chosen["unicode_form"] in DECOMPOSED_FORMS else 1.0

    def tokens_per_pair(self, chosen: Mapping[str, Any]) -> float:
        """Tokens of a pair, its two ends included."""
        tokens = {"word": self.words, "char": self.characters * self.growth(chosen)}
        # A small vocabulary has shorter pieces.
        characters_of_a_piece = 3 if chosen["vocab_size"] <= _VOCABULARY_THAT_COPIES else 4
        return 2 + tokens.get(chosen["tokenizer_kind"], self.characters / characters_of_a_piece)

    def tokens(self, preset: str) -> float:
        """Tokens that a model of this size trains on in the minutes."""
        return self.speed * 60 * self.minutes * _FOR_UPDATES / _COST[preset]

    def passes(self, chosen: Mapping[str, Any]) -> float:
        """Passes over the corpus that the minutes allow."""
        tokens_of_corpus = self.pairs * self.tokens_per_pair(chosen)
        return self.tokens(chosen["preset"]) / tokens_of_corpus

    def updates(self, chosen: Mapping[str, Any], batch: int) -> float:
        """Updates that the minutes allow, with batches of so many tokens."""
        return self.tokens(chosen["preset"]) / batch / (2 if chosen["r_drop"] else 1)


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


# Takes the facts and the options so far; None: the default stays.
Rule = Callable[[Facts, Mapping[str, Any]], tuple[Any, str] | None]


def _tokenizer_kind(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if facts.distinct_words <= 1000 and facts.occurrences >= 20:
        return "word", (
            f"only {facts.distinct_words:,} different words, each {facts.occurrences:,.0f} times"
        )
    if facts.source_words <= 1.5 and facts.source_characters <= 20:
        return "char", f"sources are single words of {facts.source_characters:.0f} characters"
    return "bpe", f"{facts.distinct_words:,} different words"


def _unicode_form(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    # Tokens of other kinds are longer than a character.
    if chosen["tokenizer_kind"] == "char" and facts.alphabet_apart <= facts.alphabet / 2:
        return "NFD", (
            f"{facts.alphabet:,} different characters consist of {facts.alphabet_apart:,} parts"
        )
    return None


def _pretokenized(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["tokenizer_kind"] == "bpe" and facts.spaced_stops >= 0.95:
        return True, f"{facts.spaced_stops:.0%} of commas and full stops come after a blank"
    return None


def _vocab_size(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["tokenizer_kind"] not in ("bpe", "unigram"):
        return None
    if facts.copied_words >= 0.25:
        reason = f"{facts.copied_words:.0%} of the long words are copied, by their pieces"
        return _VOCABULARY_THAT_COPIES, reason
    for size, limit in ((4000, 10_000), (10_000, 1_000_000)):
        if facts.pairs < limit:
            return size, f"{facts.pairs:,} pairs, less than {limit:,}"
    return 32_000, f"{facts.pairs:,} pairs"


def _separate_vocabularies(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["tokenizer_kind"] in ("bpe", "unigram") and facts.shared_letters < 0.2:
        return True, f"sources have {facts.shared_letters:.0%} of the letters of the targets"
    return None


def _max_length(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    long_characters = round(facts.long_characters * facts.growth(chosen))
    tokens = {"word": facts.long_words, "char": long_characters}
    # BPE on identifiers and rare words has 3 characters a token.
    needed = 1 + tokens.get(chosen["tokenizer_kind"], facts.long_characters // 3)
    if needed <= chosen["max_length"]:
        return None
    return min(640, needed), f"1 pair in 1,000 is longer than about {needed:,} tokens"


def _metrics(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["tokenizer_kind"] in ("word", "char"):
        return ["wer", "per"], "tokens are symbols, so whole lines and single tokens count"
    return None


def _bleu_tokenize(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["pretokenized"]:
        return "none", "the text is tokenised"
    return None


def _preset(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    for preset, pairs, passes in (("base", 1_000_000, 5), ("small", 100_000, 15)):
        if facts.pairs >= pairs and facts.passes({**chosen, "preset": preset}) >= passes:
            return preset, f"{facts.pairs:,} pairs, and time for {passes} passes and more"
    at_tiny = facts.passes({**chosen, "preset": "tiny"})
    return "tiny", f"{facts.pairs:,} pairs, and time for {at_tiny:.1f} passes of the smallest size"


def _is_pattern(facts: Facts, chosen: Mapping[str, Any]) -> bool:
    """Whether the words of a task are few, such as those of SCAN's commands."""
    return chosen["tokenizer_kind"] == "word" and facts.distinct_words < _WORDS_OF_A_PATTERN


def _dropout(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    passes = facts.passes(chosen)
    if _is_pattern(facts, chosen):
        return 0.1, f"a closed pattern of {facts.distinct_words} words"
    if passes < 10:
        return 0.1, f"{passes:.1f} passes over the data are too few to learn them by heart"
    if passes < 20 or chosen["tokenizer_kind"] in ("word", "char"):
        return 0.2, f"{passes:.0f} passes over {'symbols' if passes >= 20 else 'the data'}"
    return 0.3, f"{passes:.0f} passes over the data"


def _r_drop(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    passes = facts.passes(chosen)
    if passes >= 60 and facts.pairs < 100_000 and chosen["tokenizer_kind"] in ("bpe", "unigram"):
        return 2.0, f"{passes:.0f} passes over {facts.pairs:,} pairs, which it halves"
    return None


def _label_smoothing(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if _is_pattern(facts, chosen):
        return 0.0, "a closed pattern has one right answer"
    return None


def _max_tokens_per_batch(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    largest = _LARGEST_BATCH.get(facts.device, _LARGEST_BATCH["cuda"])
    batch = 1024 if chosen["tokenizer_kind"] in ("word", "char") else 2048
    # The longest pair must fit.
    while batch < 2 * chosen["max_length"] or (
        batch < largest and facts.updates(chosen, 2 * batch) >= 8000
    ):
        batch *= 2
    return batch, f"about {facts.updates(chosen, batch):,.0f} updates"


def _learning_rate(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["preset"] != "tiny":
        return None
    if _is_pattern(facts, chosen):
        return 0.002, "a closed pattern, learned exactly"
    batch = chosen["max_tokens_per_batch"]
    return 0.004 if batch >= 4096 else 0.003, f"tiny with batches of {batch:,} tokens"


def _warmup_steps(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    updates = facts.updates(chosen, chosen["max_tokens_per_batch"])
    most = PRESETS[chosen["preset"]].warmup_steps // 2
    steps = round(min(max(0.1 * updates, 50), most))
    return steps, f"a tenth of about {updates:,.0f} updates, from 50 to {most:,}"


def _average_last(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    return 1, "nothing to average out where the learning rate ends at 0"


def _max_validation_pairs(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if not chosen["validation"]:
        return None
    tokens = _VALIDATION_TOKENS_PER_MINUTE
    pairs = round(min(max(tokens * facts.minutes / facts.tokens_per_pair(chosen), 50), 500))
    return pairs, f"about {tokens} tokens for each minute, from 50 to 500 pairs"


def _eval_steps(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    times = round(min(max(facts.minutes / 2, 3), 12))
    updates = facts.updates(chosen, chosen["max_tokens_per_batch"])
    return max(1, round(updates / times)), f"about {times} checkpoints"


# In the order of the decisions: a rule sees those above it. `dropout` is a field of --config.
RULES: dict[str, Rule] = {
    "tokenizer_kind": _tokenizer_kind,
    "unicode_form": _unicode_form,
    "pretokenized": _pretokenized,
    "vocab_size": _vocab_size,
    "separate_vocabularies": _separate_vocabularies,
    "max_length": _max_length,
    "metrics": _metrics,
    "bleu_tokenize": _bleu_tokenize,
    "preset": _preset,
    "dropout": _dropout,
    "r_drop": _r_drop,
    "label_smoothing_factor": _label_smoothing,
    "max_tokens_per_batch": _max_tokens_per_batch,
    "learning_rate": _learning_rate,
    "warmup_steps": _warmup_steps,
    "average_last": _average_last,
    "max_validation_pairs": _max_validation_pairs,
    "eval_steps": _eval_steps,
}


def decide(facts: Facts, settings: TrainSettings, given: Iterable[str]) -> list[Decision]:
    """What the rules choose for the options that were not given.

    Args:
        facts: Of data and machine.
        settings: With what the user gave, and defaults.
        given: Names of the options that the user gave.
    """
    taken = _taken(settings, given)
    chosen, decisions = asdict(settings), []
    for option, rule in RULES.items():
        decided = None if option in taken else rule(facts, chosen)
        if decided:
            chosen[option] = decided[0]
            decisions.append(Decision(option, *decided))
    return decisions


def _taken(settings: TrainSettings, given: Iterable[str]) -> set[str]:
    """Options that the rules leave alone: those that the user gave, and what these decide."""
    taken = set(given) | {field.partition("=")[0] for field in settings.config}
    if settings.tokenizer:
        taken |= _OF_TOKENIZERS
    if taken & {"eval_strategy", "save_strategy", "save_steps"}:
        taken.add("eval_steps")
    if "metric_for_best_model" in taken:
        taken.add("metrics")
    return taken


def still_open(
    decisions: Iterable[Decision], settings: TrainSettings, given: Iterable[str]
) -> list[Decision]:
    """Earlier decisions, without those on options that the user gives now.

    Args:
        decisions: Of the beginning of a run.
        settings: Of the leg that continues it, with what the user gave, and defaults.
        given: Names of the options that the user gave for it.
    """
    taken = _taken(settings, given)
    return [decision for decision in decisions if decision.option not in taken]


def apply(decisions: Iterable[Decision], settings: Settings) -> tuple[Settings, dict[str, Any]]:
    """The settings with the decisions in them, and defaults for Trainer's arguments."""
    ours: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for decision in decisions:
        if decision.option == "dropout":
            ours["config"] = [*settings.config, f"dropout={decision.value}"]
        elif hasattr(settings, decision.option):
            ours[decision.option] = decision.value
        else:
            arguments[decision.option] = decision.value
    if "eval_steps" in arguments:
        # Each evaluation is of a checkpoint.
        arguments["save_steps"] = arguments["eval_steps"]
    # `data` has been joined with the paths already.
    return replace(settings, data=None, **ours), arguments


def choose(
    settings: TrainSettings,
    arguments: TrainingArguments,
    given: Iterable[str],
    pairs: Iterable[tuple[str, ...]],
) -> list[Decision]:
    """What the rules choose for a new run; a resumed run keeps what was chosen for it.

    Where a resumed run is given an option of its own, that counts.

    Args:
        settings: With what the user gave, and defaults. Without `minutes` nothing is chosen.
        arguments: Trainer's, likewise.
        given: Names of the options that the user gave.
        pairs: Source and target of the training pairs.
    """
    if settings.minutes is None:
        return []
    if settings.resume:
        record = Path(arguments.output_dir) / RUN_FILE
        earlier = read_object(record).get("decisions", []) if record.is_file() else []
        return still_open((Decision(**decision) for decision in earlier), settings, given)
    return decide(measure(settings.minutes, arguments, pairs), settings, given)


def measure(
    minutes: float, arguments: TrainingArguments, pairs: Iterable[tuple[str, ...]]
) -> Facts:
    """Facts of the pairs and of this machine, for a run of so many minutes."""
    return read_facts(pairs, minutes, tokens_per_second(arguments), arguments.device.type)


def read_facts(
    pairs: Iterable[tuple[str, ...]], minutes: float, speed: float, device: str
) -> Facts:
    """One pass over the pairs.

    Args:
        pairs: Source and target of each.
        minutes: Length of the run.
        speed: Of training, in tokens per second.
        device: Type of the device.
    """
    words: Counter[str] = Counter()
    characters: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    # Words and characters of source and target of each pair.
    lengths: list[tuple[int, int, int, int]] = []
    copied = long_words = spaced = stops = number = 0
    for number, (source, target, *_) in zip(count(1), pairs):
        if number > EXAMINED_PAIRS:
            continue
        of_source, of_target = source.split(), target.split()
        words.update(of_source)
        words.update(of_target)
        for side, text in zip(characters, (source, target), strict=True):
            side.update(text)
        lengths.append((len(of_source), len(of_target), len(source), len(target)))
        long = [word for word in of_target if len(word) >= 4]
        copied += len(set(of_source).intersection(long))
        long_words += len(set(long))
        for text in (source, target):
            stops += text.count(".") + text.count(",")
            spaced += text.count(" .") + text.count(" ,")
    table = np.array(lengths)
    means = table.mean(axis=0)
    letters = {letter: times for letter, times in characters[1].items() if letter.isalpha()}
    shared = sum(times for letter, times in letters.items() if letter in characters[0])
    alphabet = characters[0] + characters[1]
    parts = {character: unicodedata.normalize("NFD", character) for character in alphabet}
    apart = sum(len(parts[character]) * times for character, times in alphabet.items())
    return Facts(
        minutes=minutes,
        speed=speed,
        device=device,
        pairs=number,
        source_words=means[0],
        words=means[0] + means[1],
        source_characters=means[2],
        characters=means[2] + means[3],
        long_words=int(np.quantile(table[:, :2].max(axis=1), 0.999)),
        long_characters=int(np.quantile(table[:, 2:].max(axis=1), 0.999)),
        distinct_words=len(words),
        occurrences=words.total() / max(1, len(words)),
        shared_letters=shared / max(1, sum(letters.values())),
        copied_words=copied / max(1, long_words),
        spaced_stops=spaced / max(1, stops),
        alphabet=len(alphabet),
        alphabet_apart=len(set().union(*parts.values())),
        growth_apart=apart / max(1, alphabet.total()),
    )


def tokens_per_second(arguments: TrainingArguments) -> float:
    """Tokens of source and target per second with which `tiny` trains here, in all processes.

    The optimizer is left out. Process 0 decides, so that all choose alike.
    """
    IdleCores().use(at_once=True)
    device = arguments.device
    with torch.random.fork_rng():
        config = VanillaTransformerConfig(**PRESETS["tiny"].config(), vocab_size=10_000)
        model = VanillaTransformerForConditionalGeneration(config).to(device).train()
        ids = torch.randint(10, 10_000, (64, 20), device=device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        seconds = []
        # The first one warms up.
        for _ in range(6):
            started = time.monotonic()
            with torch.autocast(device.type, torch.bfloat16, enabled=arguments.bf16):
                loss = model(**batch).loss
            loss.backward()
            # Reading the value waits for the device.
            loss.item()
            seconds.append(time.monotonic() - started)
    speed = torch.tensor([2 * ids.numel() / np.median(seconds[1:])], device=device)
    return arguments.world_size * float(broadcast(speed.float()))
