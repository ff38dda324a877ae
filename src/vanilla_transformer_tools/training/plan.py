"""What a run will do, decided once: settings, Trainer's arguments and the model's sizes.

A `RunPlan` is pure data. It is printed, recorded, compared when the run is resumed, and executed.
Nothing is measured here, and nothing changes a plan.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.settings import METRICS, TrainSettings
from vanilla_transformer_tools.text.sentences import MOST_INNER_ENDS
from vanilla_transformer_tools.training.corpus import Facts
from vanilla_transformer_tools.training.minutes import (
    CorpusStats,
    Decision,
    decide,
    decisions_on_record,
)
from vanilla_transformer_tools.training.options import (
    consistent_defaults,
    default_schedule,
    last_checkpoints,
    new_config,
    recipe,
)
from vanilla_transformer_tools.training.ranking import metric_of
from vanilla_transformer_tools.training.start import NEW, Start

TOKENS = 8192
# Section 5.1: 25,000 source and 25,000 target tokens an update. The learning rates of these two
# presets are the paper's and belong to it; those of the others were found with smaller batches.
TOKENS_OF_PAPER = 50_000
PRESETS_OF_PAPER = ("base", "big")
# With fewer, such batches would leave few updates, and most of them to the warm-up.
PAIRS_FOR_PAPER = 1_000_000


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
    stats: CorpusStats | None = None,
    start: Start = NEW,
    checkpoint: Path | None = None,
    previous: Mapping[str, Any] | None = None,
    given: Collection[str] = (),
) -> RunPlan:
    """Decides a run, and leaves settings and arguments as they are.

    The rules of `--minutes` need `stats`, unless the run is resumed: then the record of the
    `previous` one decides. They change no option whose name is in `given`.

    Raises:
        ValueError: If the model has no positions for the longest pairs.
    """
    previous, arguments = previous or {}, copy.copy(arguments)
    decisions: tuple[Decision, ...] = ()
    if stats:
        decisions = decide(stats, settings, start.tokenizers, given)
    elif settings.minutes is not None:
        decisions = decisions_on_record(previous, settings, given)
    settings = with_decisions(decisions, settings, arguments, given)
    config = start.config if start.model and start.config else new_config(settings, start.config)
    if settings.max_length > (last := config.last_position):
        raise ValueError(
            f"--max_length {settings.max_length} is longer than the learned positions, which end "
            f"after {last} tokens. Give --max_length {last}, or, for a new model, more positions: "
            "--config max_position_embeddings=N."
        )
    if kind := METRICS.get(metric_of(arguments)):
        arguments.greater_is_better = not kind.is_error_rate
    known = previous.get("settings", {}).get("max_tokens_per_batch")
    tokens, reason = settings.max_tokens_per_batch or known, ""
    if not tokens:
        accumulated = arguments.gradient_accumulation_steps
        tokens, reason = default_batch(settings, arguments.device.type, accumulated, facts.pairs)
    settings = replace(settings, max_tokens_per_batch=tokens)
    plan = RunPlan(settings, arguments, config, facts, checkpoint, decisions, reason)
    # A start that is scored again on resuming would be another evaluation of that update.
    arguments.eval_on_start = (arguments.eval_on_start or plan.with_start) and not checkpoint
    return plan


def with_decisions(
    decisions: Collection[Decision],
    settings: TrainSettings,
    arguments: TrainingArguments,
    given: Collection[str],
) -> TrainSettings:
    """Settings with the decisions; `arguments` get theirs, and the defaults that follow."""
    ours: dict[str, Any] = {}
    trainers: dict[str, Any] = {}
    for decision in decisions:
        if decision.option == "dropout":
            ours["config"] = [*settings.config, f"dropout={decision.value}"]
        elif hasattr(settings, decision.option):
            ours[decision.option] = decision.value
        else:
            trainers[decision.option] = decision.value
    if "eval_steps" in trainers:
        # Each evaluation is of a checkpoint.
        trainers["save_steps"] = trainers["eval_steps"]
    # `data` has been joined with the paths already.
    decided = replace(settings, **ours)
    values = {name: getattr(arguments, name) for name in given if hasattr(arguments, name)}
    before = consistent_defaults(recipe(settings), values)
    for name, value in consistent_defaults(recipe(decided) | trainers, values).items():
        if name not in given and value != before.get(name):
            setattr(arguments, name, value)
    return decided


def with_tokens(plan: RunPlan, tokens: int) -> RunPlan:
    """The plan with batches of `tokens` tokens, which fit the memory."""
    wanted = plan.settings.max_tokens_per_batch
    if tokens == wanted:
        return plan
    settings = replace(plan.settings, max_tokens_per_batch=tokens)
    return replace(
        plan, settings=settings, batch_reason=f"because {wanted:,} do not fit the memory"
    )


def default_batch(
    settings: TrainSettings, device: str, accumulated: int, pairs: int | None
) -> tuple[int, str]:
    """Source plus target tokens of one of `accumulated` batches, and why; empty on a CPU.

    `pairs` is the number of training pairs; None for a stream.
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
