"""What `train --minutes` decides: a table of rules from data and speed to options, with reasons.

The rules look at the data once and search for nothing. docs/defaults.md has the evidence for each.
An option that the user gives is left alone, and later rules follow it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainingArguments

from vanilla_transformer_tools.saved_folder import RUN_FILE, read_object
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.text.saved_options import options_of
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.facts import VOCABULARY_THAT_COPIES, Facts, measure

Settings = TypeVar("Settings", bound=TrainSettings)

# A task of fewer words is a closed pattern.
_WORDS_OF_A_PATTERN = 50
# Targets that repeat this share of their sources' long words are mostly copied, such as code.
_SHARE_THAT_COPIES = 0.25
# Evaluations should take little of the time.
_VALIDATION_TOKENS_PER_MINUTE = 700
# With this number of updates, doubling the batch is better than doubling the updates.
_MANY_UPDATES = 8000
# On a GPU a batch of twice the tokens may take hardly longer.
_NEARLY_AS_MANY = 0.8
# Of `tiny`, by the least tokens of a batch.
_LEARNING_RATES = {32_768: 0.008, 4096: 0.004, 0: 0.003}

# The saved model of --tokenizer decides these, see `options_of`.
_OF_TOKENIZERS = {
    *("tokenizer_kind", "unicode_form", "vocab_size", "separate_vocabularies", "pretokenized"),
}


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
    # Sentences in scripts without blanks have translations that consist of words.
    target_words = facts.words - facts.source_words
    target_characters = facts.characters - facts.source_characters
    are_symbols = target_words <= 1.5 or target_characters <= 4 * target_words
    if facts.source_words <= 1.5 and facts.source_characters <= 20 and are_symbols:
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
    if facts.copied_words >= _SHARE_THAT_COPIES:
        reason = f"{facts.copied_words:.0%} of the long words are copied, by their pieces"
        return VOCABULARY_THAT_COPIES, reason
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
    if passes < 15:
        return 0.1, f"{passes:.1f} passes over the data are too few to learn them by heart"
    if facts.copied_words >= _SHARE_THAT_COPIES:
        return 0.1, f"{facts.copied_words:.0%} of the long words are copied, not learned by heart"
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
    batch = 1024 if chosen["tokenizer_kind"] in ("word", "char") else 2048
    # The longest pair must fit.
    while batch < 2 * chosen["max_length"] or _is_worth_doubling(facts, chosen, batch):
        batch *= 2
    return batch, f"about {facts.updates(chosen, batch):,.0f} updates"


def _is_worth_doubling(facts: Facts, chosen: Mapping[str, Any], batch: int) -> bool:
    """Whether a batch of twice the tokens leaves enough updates, or takes hardly longer."""
    if 2 * batch > facts.largest_batch(chosen):
        return False
    updates = facts.updates(chosen, 2 * batch)
    return updates >= min(_MANY_UPDATES, _NEARLY_AS_MANY * facts.updates(chosen, batch))


def _learning_rate(facts: Facts, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["preset"] != "tiny":
        return None
    if _is_pattern(facts, chosen):
        return 0.002, "a closed pattern, learned exactly"
    batch = chosen["max_tokens_per_batch"]
    rate = next(rate for least, rate in _LEARNING_RATES.items() if batch >= least)
    return rate, f"tiny with batches of {batch:,} tokens"


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
    if settings.tokenizer:
        chosen |= options_of(TokenizerPair.from_pretrained(settings.tokenizer))
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
    return replace(settings, **ours), arguments


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
        taken = _taken(settings, given)
        return [Decision(**decision) for decision in earlier if decision["option"] not in taken]
    return decide(measure(settings.minutes, arguments, pairs), settings, given)
