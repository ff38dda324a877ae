"""What a run will do, decided once: settings, Trainer's arguments and the model's sizes.

A `RunPlan` is pure data. It is printed, recorded, compared when the run is resumed, and executed.
Nothing is measured here, and nothing changes a plan.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import Seq2SeqTrainingArguments

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.evaluation.metrics import METRICS
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.sentences import MOST_INNER_ENDS
from vanilla_transformer_tools.training.corpus import Facts
from vanilla_transformer_tools.training.minutes import (
    Decision,
    decide,
    decisions_on_record,
    with_decisions,
)
from vanilla_transformer_tools.training.options import default_schedule, last_checkpoints
from vanilla_transformer_tools.training.ranking import metric_of
from vanilla_transformer_tools.training.start import NEW, Start, new_config
from vanilla_transformer_tools.training.stats import CorpusStats

TOKENS = 8192
# Section 5.1: 25,000 source and 25,000 target tokens an update. The learning rates of these two
# presets are the paper's and belong to it; those of the others were found with smaller batches.
TOKENS_OF_PAPER = 50_000
PRESETS_OF_PAPER = ("base", "big")
# With fewer, such batches would leave few updates, and most of them to the warm-up.
PAIRS_FOR_PAPER = 1_000_000


@dataclass(frozen=True)
class Machine:
    """What a plan must know of the machine.

    Attributes:
        device: Type of the device, such as "cpu".
        bf16_is_faster: Whether a CPU multiplies faster in bfloat16.
    """

    device: str = "cpu"
    bf16_is_faster: bool = False


@dataclass(frozen=True)
class RunPlan:
    """A run that is decided.

    Attributes:
        settings: Our settings, with what `--minutes` chose and the size of the batches.
        arguments: Trainer's arguments, as they are executed.
        config: The model's config; a vocabulary to be learned is as large as it may become.
        facts: What the text shows.
        checkpoint: Folder to resume from; None for a new run.
        decisions: What `--minutes` chose, and why.
        batch_reason: Why the batches have their size; empty if the user knows it.
    """

    settings: TrainSettings
    arguments: Seq2SeqTrainingArguments
    config: VanillaTransformerConfig
    facts: Facts
    checkpoint: Path | None = None
    decisions: tuple[Decision, ...] = ()
    batch_reason: str = ""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.arguments.output_dir)

    @property
    def is_scored(self) -> bool:
        """Whether validation scores compare weights."""
        return bool(self.settings.validation) and self.arguments.eval_strategy != "no"

    @property
    def averaged(self) -> int:
        """Number of last checkpoints to average; by default one where no scores can compare."""
        is_averaged = self.is_scored or self.settings.average_last is not None
        return last_checkpoints(self.settings) if is_averaged else 1

    @property
    def with_start(self) -> bool:
        """Whether the weights before the first update are a candidate: those of a saved model."""
        return self.is_scored and self.settings.init_from is not None

    @property
    def last_evaluations(self) -> int:
        """Number of evaluations after the last update: of its weights, and of both averages."""
        averages = (self.averaged > 1) + (self.settings.moving_average is not None)
        return 1 + averages if self.settings.validation else 1

    def describe(self) -> Iterator[str]:
        """The lines that are printed of choices, without those that the user made."""
        yield from map(str, self.decisions)
        settings, facts = self.settings, self.facts
        if settings.init_from:
            rate, warmup = self.arguments.learning_rate, self.arguments.warmup_steps
            schedule = {"learning_rate": rate, "warmup_steps": warmup}
            is_default = schedule == default_schedule(settings)
            source = ", the defaults with --init_from" if is_default else ""
            yield f"rate        {rate:g} after {warmup:g} updates of warm-up{source}"
        if self.batch_reason:
            yield f"batch       {settings.max_tokens_per_batch:,} tokens, {self.batch_reason}"
        cut = "" if facts.inner_ends <= MOST_INNER_ENDS else " if told to"
        of_first = "first " * (facts.pairs is None)
        yield (
            f"sentences   {facts.inner_ends:.1%} of the {of_first}sources have more than one; "
            f"translate cuts lines by sentence{cut}"
        )
        scored = settings.max_validation_pairs
        if scored is not None and scored < facts.validation_pairs:
            yield f"validation  {scored:,} of {facts.validation_pairs:,} pairs, from all over them"
        if "bleu" in settings.metrics and facts.bleu:
            yield f"BLEU        tokenizer {facts.bleu}"


def plan_run(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    facts: Facts,
    *,
    machine: Machine = Machine(),
    stats: CorpusStats | None = None,
    start: Start = NEW,
    checkpoint: Path | None = None,
    previous: Mapping[str, Any] | None = None,
    given: Collection[str] = (),
) -> RunPlan:
    """Decides a run.

    Args:
        settings: Settings of the user, and defaults; checked.
        arguments: Trainer's arguments, which stay as they are.
        facts: What the text shows.
        machine: What the machine can do.
        stats: For the rules of `--minutes`; not needed for a run that is resumed.
        start: What the run takes over from a saved model.
        checkpoint: Folder to resume from; None for a new run.
        previous: Record of the run that is resumed.
        given: Names of the options that the user gave, which no rule changes.

    Raises:
        ValueError: If the model has no positions for the longest pairs.
    """
    previous = previous or {}
    arguments = with_precision(arguments, machine, previous, given)
    decisions: tuple[Decision, ...] = ()
    if stats and not checkpoint:
        decisions = decide(stats, settings, start.tokenizers, given)
    elif settings.minutes is not None:
        decisions = decisions_on_record(previous, settings, given)
    settings = with_decisions(decisions, settings, arguments, given)
    config = start.config if start.model and start.config else new_config(settings, start.config)
    _check_positions(settings.max_length, config.last_position)
    _choose_metric(arguments, facts)
    known = previous.get("settings", {}).get("max_tokens_per_batch")
    tokens, reason = settings.max_tokens_per_batch or known, ""
    if not tokens:
        accumulated = arguments.gradient_accumulation_steps
        tokens, reason = default_batch(settings, machine.device, accumulated, facts.pairs)
    settings = replace(settings, max_tokens_per_batch=tokens)
    plan = RunPlan(settings, arguments, config, facts, checkpoint, decisions, reason)
    # A start that is scored again on resuming would be another evaluation of that update.
    arguments.eval_on_start = (arguments.eval_on_start or plan.with_start) and not checkpoint
    return plan


def with_tokens(plan: RunPlan, tokens: int) -> RunPlan:
    """The plan with batches of `tokens` tokens, which fit the memory."""
    wanted = plan.settings.max_tokens_per_batch
    if tokens == wanted:
        return plan
    settings = replace(plan.settings, max_tokens_per_batch=tokens)
    return replace(
        plan, settings=settings, batch_reason=f"because {wanted:,} do not fit the memory"
    )


def _check_positions(longest: int, last: float) -> None:
    """Rejects pairs that are longer than the positions of a model."""
    if longest > last:
        raise ValueError(
            f"--max_length {longest} is longer than the learned positions, which end after {last} "
            f"tokens. Give --max_length {last}, or, for a new model, more positions: --config "
            "max_position_embeddings=N."
        )


def with_precision(
    arguments: Seq2SeqTrainingArguments,
    machine: Machine,
    previous: Mapping[str, Any],
    given: Collection[str],
) -> Seq2SeqTrainingArguments:
    """A copy of the arguments; bf16 is on where a CPU multiplies faster in it.

    A resumed run keeps what it began with: a busy machine might measure otherwise.
    """
    arguments = copy.copy(arguments)
    is_chosen = {"bf16", "fp16"} & set(given) or arguments.bf16 or arguments.fp16
    if machine.device == "cpu" and not is_chosen:
        recorded = previous.get("arguments", {})
        arguments.bf16 = recorded.get("bf16", machine.bf16_is_faster)
        arguments.mixed_precision = "bf16" if arguments.bf16 else arguments.mixed_precision
    return arguments


def _choose_metric(arguments: Seq2SeqTrainingArguments, facts: Facts) -> None:
    """Sets the score that chooses checkpoints, chrF where no BLEU fits, and its direction."""
    score = metric_of(arguments)
    if score == "bleu" and facts.bleu and not facts.bleu.fits:
        score = arguments.metric_for_best_model = "chrf"
    if kind := METRICS.get(score):
        arguments.greater_is_better = not kind.is_error_rate


def default_batch(
    settings: TrainSettings, device: str, accumulated: int, pairs: int | None
) -> tuple[int, str]:
    """Source plus target tokens of one of `accumulated` batches, and why; empty on a CPU.

    Args:
        settings: Settings of the run.
        device: Type of the device.
        accumulated: Batches of an update.
        pairs: Number of training pairs; None for a stream.
    """
    if device != "cuda":
        return TOKENS, ""
    if settings.init_from:
        return TOKENS, "the default with --init_from"
    per_batch = TOKENS_OF_PAPER // accumulated
    if settings.preset not in PRESETS_OF_PAPER or per_batch <= TOKENS:
        return TOKENS, f"the default of {settings.preset}"
    if pairs is not None and pairs < PAIRS_FOR_PAPER:
        return TOKENS, f"the default of {settings.preset} with fewer than {PAIRS_FOR_PAPER:,} pairs"
    return per_batch, f"{TOKENS_OF_PAPER:,} an update as in the paper"
