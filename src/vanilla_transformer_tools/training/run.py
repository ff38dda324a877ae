"""Training from parallel text to a saved model: the recipe of section 5 of the paper.

Differs from the paper:
    The length of a run is a number of epochs, and each epoch ends with a checkpoint; the paper
    fixes the number of updates and saves a checkpoint every ten minutes. As in the paper, the mean
    of the last checkpoints is saved if it does better on the validation pairs than the best
    checkpoint. Without validation pairs, the last checkpoint is saved by default, and the
    mean if `average_last` asks for it.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, Seq2SeqTrainingArguments, set_seed

from vanilla_transformer.tokenization_vanilla_transformer import language_tags
from vanilla_transformer_tools.files import scratch_folder, share_weights
from vanilla_transformer_tools.saved_folder import LOG_FILE, describe_model_files, write_run
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS, VALIDATION, TrainSettings
from vanilla_transformer_tools.sharing.model_card import (
    forget_results,
    record_results,
    write_model_card,
)
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.filters import FilteredPairs, read_corpus
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import TrainingData, build_data
from vanilla_transformer_tools.threads import IdleCores
from vanilla_transformer_tools.training.averaging import (
    MovingAverage,
    Outcome,
    average_weights,
    best_weights,
    metric_of,
    prefer_last,
    scores_of_update,
    try_weights,
)
from vanilla_transformer_tools.training.checkpoints import (
    check_free,
    check_optimizer,
    claimed,
    closed_checkpoints,
    delete_unclosed,
    failed_writes_named,
    find_checkpoint,
    read_state,
    update_of,
    with_intact_weights,
)
from vanilla_transformer_tools.training.optimizer import muon_and_adam
from vanilla_transformer_tools.training.plan import RunPlan, plan_run
from vanilla_transformer_tools.training.processes import limit_waiting
from vanilla_transformer_tools.training.recipe import check_settings
from vanilla_transformer_tools.training.reports import (
    JsonLinesLog,
    forecast,
    plot_curves,
    progress_shown,
)
from vanilla_transformer_tools.training.starting_model import build_model, load_start, merge_adapter
from vanilla_transformer_tools.training.stopping import (
    StopOnRequest,
    StoppedBySignalError,
    interrupts_stop,
)
from vanilla_transformer_tools.training.trainer import (
    DivergedError,
    Scorer,
    TokenBatchTrainer,
    TrainingPass,
    r_drop,
    scorer,
)


def train(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    training_pass: TrainingPass | None = None,
    given: Collection[str] = (),
) -> Path:
    """Trains tokenizers and model, or continues with saved ones, and saves the result.

    Args:
        settings: Data, sizes, vocabulary, batches.
        arguments: Trainer's arguments; `recipe` has our defaults. They stay as they are.
        training_pass: Calls the model, see `TokenBatchTrainer`; None: as the settings say.
        given: Names of the options that the user gave, which `--minutes` does not change.

    Returns:
        The folder with the model, `arguments.output_dir`.

    Raises:
        ValueError: If settings, data and folder do not fit together; before any training.
        OSError: If a file cannot be read or written.
        DivergedError: If the loss or the weights are no longer finite; the folder then holds the
            last finite checkpoint, if there is one.
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
    plan = plan_run(settings, arguments, corpus, start, checkpoint, given)
    trainer = build(plan, training_pass)
    stop = StopOnRequest(plan.settings, started, checkpoint, plan.last_evaluations)
    with _opened_folder(plan, trainer), interrupts_stop(stop):
        first_update = plan.record["first_update"]
        for line in chain(plan.describe(), forecast(trainer, first_update, stop.minutes_left)):
            PartialState().print(line)
        log = JsonLinesLog(plan.folder / LOG_FILE, first_update)
        outcome, interruption = _run(plan, trainer, stop, log)
        results = _results(trainer, corpus.filtered, outcome, log)
        results["finished_on_request"] = stop.finishing and not interruption
        results["interrupted"] = isinstance(interruption, StoppedBySignalError)
        _save(trainer, settings.init_from, plan.record | results, outcome)
    PartialState().print(f"The model is in {plan.folder}")
    if interruption:
        raise interruption
    return plan.folder


def build(plan: RunPlan, training_pass: TrainingPass | None = None) -> TokenBatchTrainer:
    """Makes or loads tokenizers, model and batches of a run.

    Args:
        plan: Plan of the run.
        training_pass: Calls the model, see `TokenBatchTrainer`; None: as the settings say.

    Raises:
        ValueError: If model, tokenizers and checkpoint do not fit together.
    """
    settings, arguments, filtered = plan.settings, plan.arguments, plan.corpus.filtered
    limit_waiting(arguments)
    set_seed(arguments.seed)
    tokenizers, model = build_model(settings, plan.start, plan.config, filtered.kept)
    data = build_data(plan.corpus, tokenizers, settings, arguments)
    if settings.r_drop:
        training_pass = partial(r_drop, alpha=settings.r_drop)
    trainer = _build_trainer(plan, model, tokenizers, data, training_pass)
    if plan.checkpoint:
        check_optimizer(plan.checkpoint, trainer.is_sharded)
    return trainer


def _build_trainer(
    plan: RunPlan,
    model: PreTrainedModel,
    tokenizers: TokenizerPair,
    data: TrainingData,
    training_pass: TrainingPass | None,
) -> TokenBatchTrainer:
    """Trainer with training data and validation sets."""
    settings, arguments = plan.settings, plan.arguments
    scores_text = arguments.predict_with_generate and not arguments.prediction_loss_only
    sets: dict[str, tuple[Dataset, Scorer | None]] = {}
    longest = 0
    for name, pairs in plan.corpus.validation.items():
        if settings.max_validation_pairs is not None:
            pairs = pairs.select(range(min(settings.max_validation_pairs, len(pairs))))
        tokenized, _ = tokenize_pairs(pairs, tokenizers, max_length=settings.max_length)
        # Sources of similar length are generated together, which saves steps.
        source_lengths = pair_lengths(tokenized)[:, 0]
        longest = max(longest, int(source_lengths.max()))
        tokenized = tokenized.select(np.argsort(-source_lengths, kind="stable"))
        # Outputs have no blank ends either.
        references = list(map(without_blank_ends, tokenized["target"]))
        bleu_tokenizer = plan.bleu_tokenizers[name]
        score_set = scorer(tokenizers.target, references, bleu_tokenizer, settings.metrics)
        sets[name] = tokenized, score_set if scores_text else None
    first_set, first_scorer = sets.pop(VALIDATION, (None, None))
    decay = settings.moving_average
    trainer = TokenBatchTrainer(
        data,
        tokenizers,
        training_pass,
        model=model,
        args=arguments,
        eval_dataset=first_set,
        compute_metrics=first_scorer,
        further_sets=sets,
        # The start token too.
        longest_output=1 + int(min(longest + MAX_EXTRA_TOKENS, plan.config.last_position)),
        patience=settings.early_stopping_patience,
        moving_average=None if decay is None else MovingAverage(decay),
    )
    if settings.optimizer == "muon":
        trainer.optimizer = muon_and_adam(trainer)
    return trainer


@contextmanager
def _opened_folder(plan: RunPlan, trainer: TokenBatchTrainer) -> Iterator[None]:
    """Claims the folder of a run, and writes the facts that are known before training."""
    is_main = trainer.is_world_process_zero()
    with claimed(plan.folder) if is_main else nullcontext():
        if is_main:
            if not plan.checkpoint:
                # Another run may have finished here while the pairs were read.
                check_free(plan.folder)
            delete_unclosed(plan.folder)
            write_run(plan.folder, plan.record)
            plan.corpus.filtered.write_dropped(plan.folder)
        yield


def _run(
    plan: RunPlan, trainer: TokenBatchTrainer, stop: StopOnRequest, log: JsonLinesLog
) -> tuple[Outcome, BaseException | None]:
    """Trains, and puts the best weights into the model.

    Returns their description, and what ended the run early: a signal, divergence, or None.
    """
    moving_average = trainer.moving_average
    trainer.add_callback(log)
    trainer.add_callback(stop)
    checkpoint = str(plan.checkpoint) if plan.checkpoint else None
    try:
        with progress_shown(trainer, stop):
            trainer.train(resume_from_checkpoint=checkpoint)
            outcome = best_weights(trainer)
            trainer.check_weights()
            if not stop.is_interrupted(trainer.args):
                if plan.settings.minutes is not None:
                    outcome = prefer_last(trainer, outcome)
                outcome = average_weights(trainer, plan.averaged, outcome)
            if moving_average and not stop.is_interrupted(trainer.args):
                name = f"exponential moving average, {plan.settings.moving_average}"
                outcome = try_weights(trainer, moving_average.weights, name, outcome)
    except StoppedBySignalError as error:
        if trainer.is_sharded:
            # Another process may be anywhere, so its part of the weights cannot be had.
            raise
        trainer.check_weights()
        return Outcome("last update"), error
    except DivergedError as error:
        return _back_to_last_checkpoint(trainer, error)
    return outcome, StoppedBySignalError(stop.signum) if stop.interrupted else None


def _back_to_last_checkpoint(
    trainer: TokenBatchTrainer, error: DivergedError
) -> tuple[Outcome, DivergedError]:
    """Loads the last finite weights of a run that diverged; returns them and the error to raise."""
    folder = Path(trainer.args.output_dir)
    advice = (
        f"Lower --learning_rate, now {trainer.args.learning_rate:g}, or lengthen --warmup_steps, "
        f"now {trainer.args.warmup_steps:g}, and train again in another folder"
    )
    # The last update may have a checkpoint, and a validation loss that is not finite.
    before = [
        checkpoint
        for checkpoint in closed_checkpoints(folder)
        if update_of(checkpoint.name) < trainer.state.global_step
    ]
    checkpoints = with_intact_weights(before)
    if not checkpoints:
        raise DivergedError(
            f"Training diverged: {error}, before there was a checkpoint. {folder} holds no model. "
            f"{advice}."
        ) from error
    last = checkpoints[-1]
    trainer._load_from_checkpoint(str(last))
    trainer.state = read_state(last)
    outcome = Outcome(
        f"{last.name}, before training diverged",
        scores_of_update(trainer, trainer.state.global_step),
    )
    return outcome, DivergedError(
        f"Training diverged: {error}. {folder} holds the weights of {last.name}, the last finite "
        f"ones. {advice}, from here with --init_from {folder}."
    )


def _results(
    trainer: TokenBatchTrainer, filtered: FilteredPairs, outcome: Outcome, log: JsonLinesLog
) -> dict[str, Any]:
    """What `run.json` states of a run that has ended."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        **trainer.data.record(trainer.state.epoch or 0),
        "dropped_pairs": filtered.dropped,
        "target_languages": list(language_tags(trainer.tokenizers.source)),
        "trained_parameters": model.num_parameters(only_trainable=True),
        "updates": trainer.state.global_step,
        "weights": outcome.weights,
        "minutes": round(log.minutes, 1),
    }


def _save(
    trainer: TokenBatchTrainer, base: str | None, run: Mapping[str, Any], outcome: Outcome
) -> None:
    """Writes the model's folder; each file appears whole or not at all.

    All processes call it, because each may have a part of the weights. An adapter was trained for
    the model `base`.
    """
    weights: dict[str, Tensor] | None = None
    if trainer.is_sharded:
        # Empty in all processes but the main one.
        weights = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir)
    model = trainer.accelerator.unwrap_model(trainer.model)
    with scratch_folder(folder, ".saving-") as unfinished:
        with failed_writes_named(folder):
            merge_adapter(model, unfinished, base)
            model.save_pretrained(unfinished, state_dict=weights)
            trainer.tokenizers.save_pretrained(unfinished)
            share_weights(unfinished)
        run = {**run, "parameters": model.num_parameters()}
        # Earlier checksums do not match the files that now replace the old ones.
        write_run(folder, {**run, "files": {}})
        files = describe_model_files(unfinished)
        for file in sorted(unfinished.rglob("*")):
            place = folder / file.relative_to(unfinished)
            if file.is_dir():
                place.mkdir(exist_ok=True)
            else:
                file.replace(place)
    write_run(folder, {**run, "files": files})
    if run.get("files", files) != files:
        # Earlier scores are of the weights, or of the vocabulary, that have just been replaced.
        forget_results(folder)
    # The card has no row for a loss alone.
    if outcome.scores and trainer.compute_metrics:
        beams = trainer.args.generation_num_beams or 1
        search = f"beam {beams}" if beams > 1 else "greedy"
        how = {"search": f"{search}, {outcome.weights}"}
        for name, scores in _scores_by_set(outcome.scores, trainer.further_sets).items():
            record_results(folder, name, scores | how)
    else:
        write_model_card(folder)
    try:
        plot_curves(folder, metric_of(trainer.args))
    except ImportError as error:
        PartialState().print(str(error))


def _scores_by_set(scores: Mapping[str, Any], further: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Scores of each validation set, of which the further ones have its name before theirs."""
    by_set: dict[str, dict[str, Any]] = {VALIDATION: {}, **{name: {} for name in further}}
    for key, value in scores.items():
        name, _, score = key.partition("_")
        if name in by_set:
            by_set[name][score] = value
        else:
            by_set[VALIDATION][key] = value
    return by_set
