"""What `train --minutes` decides: a rule for each option, from text and speed to a value.

The rules look at the data once and search for nothing. docs/defaults.md has the evidence for each.
An option that the user gives is not changed, and later rules follow it.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from vanilla_transformer.tokenization_vanilla_transformer import TokenizerKind
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.corpus_stats import VOCABULARY_THAT_COPIES, CorpusStats
from vanilla_transformer_tools.training.recipe import in_step, recipe

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


# Takes the text and the options so far; None: the default stays.
Rule = Callable[[CorpusStats, Mapping[str, Any]], tuple[Any, str] | None]


def _tokenizer_kind(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if stats.distinct_words <= 1000 and stats.occurrences >= 20:
        return "word", (
            f"only {stats.distinct_words:,} different words, each {stats.occurrences:,.0f} times"
        )
    # Sentences in scripts without blanks have translations that consist of words.
    target_words = stats.words - stats.source_words
    target_characters = stats.characters - stats.source_characters
    are_symbols = target_words <= 1.5 or target_characters <= 4 * target_words
    if stats.source_words <= 1.5 and stats.source_characters <= 20 and are_symbols:
        return "char", f"sources are single words of {stats.source_characters:.0f} characters"
    return "bpe", f"{stats.distinct_words:,} different words"


def _unicode_form(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    # Tokens of other kinds are longer than a character.
    if chosen["tokenizer_kind"] == "char" and stats.alphabet_apart <= stats.alphabet / 2:
        return "NFD", (
            f"{stats.alphabet:,} different characters consist of {stats.alphabet_apart:,} parts"
        )
    return None


def _vocab_size(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["tokenizer_kind"] not in ("bpe", "unigram"):
        return None
    if stats.is_copied:
        reason = f"{stats.copied_words:.0%} of the long words are copied, by their pieces"
        return VOCABULARY_THAT_COPIES, reason
    for size, limit in ((4000, 10_000), (10_000, 1_000_000)):
        if stats.pairs < limit:
            return size, f"{stats.pairs:,} pairs, less than {limit:,}"
    return 32_000, f"{stats.pairs:,} pairs"


def _max_length(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    long_characters = round(stats.long_characters * stats.growth(chosen))
    tokens = {"word": stats.long_words, "char": long_characters}
    # BPE on identifiers and rare words has 3 characters a token.
    needed = 1 + tokens.get(chosen["tokenizer_kind"], stats.long_characters // 3)
    if needed <= chosen["max_length"]:
        return None
    return min(640, needed), f"1 pair in 1,000 is longer than about {needed:,} tokens"


def _metrics(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["tokenizer_kind"] in ("word", "char"):
        return ["wer", "per"], "tokens are symbols, so whole lines and single tokens count"
    return None


def _preset(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    for preset, pairs, passes in (("base", 1_000_000, 5), ("small", 100_000, 15)):
        if stats.pairs >= pairs and stats.passes({**chosen, "preset": preset}) >= passes:
            return preset, f"{stats.pairs:,} pairs, and time for {passes} passes and more"
    at_tiny = stats.passes({**chosen, "preset": "tiny"})
    return "tiny", f"{stats.pairs:,} pairs, and time for {at_tiny:.1f} passes of the smallest size"


def _dropout(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    passes = stats.passes(chosen)
    if stats.is_pattern and chosen["tokenizer_kind"] == "word":
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


def _r_drop(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    passes = stats.passes(chosen)
    if passes >= 60 and stats.pairs < 100_000 and chosen["tokenizer_kind"] in ("bpe", "unigram"):
        return 2.0, f"{passes:.0f} passes over {stats.pairs:,} pairs, which it halves"
    return None


def _label_smoothing(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if stats.is_pattern and chosen["tokenizer_kind"] == "word":
        return 0.0, "a closed pattern has one right answer"
    return None


def _max_tokens_per_batch(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    batch = 1024 if chosen["tokenizer_kind"] in ("word", "char") else 2048
    # The longest pair must fit.
    while batch < 2 * chosen["max_length"] or _is_worth_doubling(stats, chosen, batch):
        batch *= 2
    return batch, f"about {stats.updates(chosen, batch):,.0f} updates"


def _is_worth_doubling(stats: CorpusStats, chosen: Mapping[str, Any], batch: int) -> bool:
    """Whether a batch of twice the tokens leaves enough updates, or takes hardly longer."""
    if 2 * batch > stats.largest_batch(chosen):
        return False
    updates = stats.updates(chosen, 2 * batch)
    return updates >= min(_MANY_UPDATES, _NEARLY_AS_MANY * stats.updates(chosen, batch))


def _optimizer(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["preset"] != "tiny" or stats.device != "cpu":
        return None
    return "muon", "tiny on a CPU learns more in the same time than with Adam"


def _learning_rate(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if chosen["preset"] != "tiny":
        return None
    rates, rate_of_pattern = _LEARNING_RATES[chosen["optimizer"]]
    if stats.is_pattern and chosen["tokenizer_kind"] == "word":
        return rate_of_pattern, f"a closed pattern, learned exactly, with {chosen['optimizer']}"
    batch = chosen["max_tokens_per_batch"]
    rate = next(rate for least, rate in rates.items() if batch >= least)
    return rate, f"tiny with {chosen['optimizer']} and batches of {batch:,} tokens"


def _warmup_steps(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    updates = stats.updates(chosen, chosen["max_tokens_per_batch"])
    most = PRESETS[chosen["preset"]].warmup_steps // 2
    steps = round(min(max(0.1 * updates, 50), most))
    return steps, f"a tenth of about {updates:,.0f} updates, from 50 to {most:,}"


def _average_last(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    return 1, "nothing to average out where the learning rate ends at 0"


def _max_validation_pairs(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    if not chosen["validation"]:
        return None
    tokens = _VALIDATION_TOKENS_PER_MINUTE
    pairs = round(min(max(tokens * stats.minutes / stats.tokens_per_pair(chosen), 50), 500))
    return pairs, f"about {tokens} tokens for each minute, from 50 to 500 pairs"


def _eval_steps(stats: CorpusStats, chosen: Mapping[str, Any]) -> tuple[Any, str] | None:
    times = round(min(max(stats.minutes / 2, 3), 12))
    updates = stats.updates(chosen, chosen["max_tokens_per_batch"])
    return max(1, round(updates / times)), f"about {times} checkpoints"


# In the order of the decisions: a rule sees those above it. `dropout` is a field of --config.
RULES: dict[str, Rule] = {
    "tokenizer_kind": _tokenizer_kind,
    "unicode_form": _unicode_form,
    "vocab_size": _vocab_size,
    "max_length": _max_length,
    "metrics": _metrics,
    "preset": _preset,
    "dropout": _dropout,
    "r_drop": _r_drop,
    "label_smoothing_factor": _label_smoothing,
    "max_tokens_per_batch": _max_tokens_per_batch,
    "optimizer": _optimizer,
    "learning_rate": _learning_rate,
    "warmup_steps": _warmup_steps,
    "average_last": _average_last,
    "max_validation_pairs": _max_validation_pairs,
    "eval_steps": _eval_steps,
}


def decisions_on_record(
    previous: Mapping[str, Any], settings: TrainSettings, given: Collection[str]
) -> tuple[Decision, ...]:
    """Decisions for the run that is resumed, but for the options that it is given now.

    Args:
        previous: Record of the run.
        settings: Settings of the user, and defaults.
        given: Names of the options that the user gave.
    """
    taken, recorded = _taken(settings, given), previous.get("decisions", [])
    return tuple(Decision(**each) for each in recorded if each["option"] not in taken)


def follow(
    decisions: Collection[Decision],
    settings: TrainSettings,
    arguments: TrainingArguments,
    given: Collection[str],
) -> TrainSettings:
    """Settings with the decisions, but for the size of the batches, which must fit the memory too.

    Args:
        decisions: Choices of the rules.
        settings: Settings of the user, and defaults.
        arguments: Trainer's arguments, which get their decisions, and the defaults that follow.
        given: Names of the options that the user gave.
    """
    ours: dict[str, Any] = {}
    trainers: dict[str, Any] = {}
    for decision in decisions:
        if decision.option == "dropout":
            ours["config"] = [*settings.config, f"dropout={decision.value}"]
        elif not hasattr(settings, decision.option):
            trainers[decision.option] = decision.value
        elif decision.option != "max_tokens_per_batch":
            ours[decision.option] = decision.value
    if "eval_steps" in trainers:
        # Each evaluation is of a checkpoint.
        trainers["save_steps"] = trainers["eval_steps"]
    # `data` has been joined with the paths already.
    decided = replace(settings, **ours)
    values = {name: getattr(arguments, name) for name in given if hasattr(arguments, name)}
    before = in_step(recipe(settings), values)
    for name, value in in_step(recipe(decided) | trainers, values).items():
        if name not in given and value != before.get(name):
            setattr(arguments, name, value)
    return decided


def run_rules(
    stats: CorpusStats,
    settings: TrainSettings,
    tokenizers: TokenizerPair | None,
    given: Collection[str],
) -> tuple[Decision, ...]:
    """Choices of the rules for the options that were not given.

    Args:
        stats: Statistics of text and machine.
        settings: Settings of the user, and defaults.
        tokenizers: Saved tokenizers that the run takes over; None: it learns its own.
        given: Names of the options that the user gave.
    """
    taken = _taken(settings, given)
    chosen, decisions = asdict(settings), []
    if tokenizers:
        # Of imported tokenizers the nearest options; those of both sides are the source's.
        source = tokenizers.source
        form = source.init_kwargs.get("unicode_form")
        chosen |= {"tokenizer_kind": _kind(source), "unicode_form": form, "vocab_size": len(source)}
    for option, rule in RULES.items():
        decided = None if option in taken else rule(stats, chosen)
        if decided:
            chosen[option] = decided[0]
            decisions.append(Decision(option, *decided))
    return tuple(decisions)


def _taken(settings: TrainSettings, given: Collection[str]) -> set[str]:
    """Options that the rules do not change: the user's, and the ones that these decide."""
    taken = set(given) | {field.partition("=")[0] for field in settings.config}
    if settings.tokenizer:
        taken |= {"tokenizer_kind", "unicode_form", "vocab_size"}
    if taken & {"eval_strategy", "save_strategy", "save_steps"}:
        taken.add("eval_steps")
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
