"""Training from parallel text to a saved model: the recipe of section 5 of the paper.

Differs from the paper:
    The length of a run is a number of epochs, and each epoch ends with a checkpoint; the paper
    fixes the number of updates and saves a checkpoint every ten minutes. As in the paper, the mean
    of the last checkpoints is saved if it does better on the validation pairs than the best
    checkpoint. Without validation pairs, the last checkpoint is saved by default, and the
    mean if `average_last` asks for it.
"""

import shlex
import time
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer_tools.saved_folder import LOG_FILE, read_run
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import Corpus, read_corpus
from vanilla_transformer_tools.threads import IdleCores
from vanilla_transformer_tools.training.build import build
from vanilla_transformer_tools.training.checkpoints import check_free, find_checkpoint, opened_run
from vanilla_transformer_tools.training.corpus import look_at
from vanilla_transformer_tools.training.finish import finished, results, save_folder
from vanilla_transformer_tools.training.machine import training_speed, with_precision
from vanilla_transformer_tools.training.minutes import look
from vanilla_transformer_tools.training.plan import RunPlan, plan_run
from vanilla_transformer_tools.training.record import record_of
from vanilla_transformer_tools.training.reports import JsonLinesLog, summary
from vanilla_transformer_tools.training.rules import check_settings
from vanilla_transformer_tools.training.schedule import Schedule, interrupts_stop
from vanilla_transformer_tools.training.start import Start, load_start


def train(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    given: Collection[str] = (),
) -> Path:
    """Trains tokenizers and model, or continues with saved ones; returns the folder of the result.

    Args:
        settings: Data, sizes, vocabulary, batches.
        arguments: Trainer's arguments; `recipe` has our defaults. They stay as they are.
        given: Names of the options that the user gave, which no rule changes.

    Raises:
        ValueError, OSError, DivergedError: As `training.train` does.
        StoppedBySignalError: After Ctrl-C or SIGTERM, when the model has been saved.
    """
    started, cores = time.monotonic(), IdleCores()
    check_settings(settings, arguments)
    folder = Path(arguments.output_dir)
    checkpoint = find_checkpoint(folder) if settings.resume else None
    if not checkpoint:
        check_free(folder)
    start = load_start(settings, checkpoint)
    corpus = read_corpus(settings)
    cores.use()
    previous = read_run(str(folder)) if checkpoint else {}
    plan = decide(settings, arguments, corpus, start, checkpoint, previous, given)
    trainer = build(plan, corpus, start)
    plan = trainer.plan
    record = record_of(plan, previous)
    schedule = Schedule(plan.settings, started, checkpoint, plan.last_evaluations)
    with opened_run(folder, checkpoint, record, corpus), interrupts_stop(schedule):
        first_update = record["first_update"]
        lines = summary(trainer, schedule.minutes_left)
        for line in chain(corpus.filtered.summary(), plan.describe(), lines):
            PartialState().print(line)
        log = JsonLinesLog(folder / LOG_FILE, first_update)
        chosen, interruption = finished(trainer, schedule, log)
        record |= results(trainer, corpus.filtered, chosen, log.minutes, interruption)
        save_folder(trainer, record, chosen)
    command = shlex.join(["vanilla-transformer", "translate", "--model", str(folder), "TEXT"])
    PartialState().print(f"The model is in {folder}\ntranslate   {command}")
    if interruption:
        raise interruption
    return folder


def decide(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    corpus: Corpus,
    start: Start,
    checkpoint: Path | None,
    previous: Mapping[str, Any],
    given: Collection[str],
) -> RunPlan:
    """The plan of a run, from what text, machine and an earlier part of the run show."""
    arguments = with_precision(arguments, previous, given)
    stats = None
    if settings.minutes is not None and not checkpoint:
        speed = training_speed(arguments)
        stats = look(settings.minutes, speed, arguments, corpus.filtered.kept)
    return plan_run(
        settings,
        arguments,
        look_at(corpus, settings, previous),
        stats=stats,
        start=start,
        checkpoint=checkpoint,
        previous=previous,
        given=given,
    )
