"""Training from parallel text to a saved model: the recipe of section 5 of the paper.

Differs from the paper:
    The length of a run is a number of epochs, and each epoch ends with a checkpoint; the paper
    fixes the number of updates and saves a checkpoint every ten minutes. As in the paper, the mean
    of the last checkpoints is saved if it does better on the validation pairs than the best
    checkpoint alone. Without validation pairs, the last checkpoint is saved by default, and the
    mean if `average_last` asks for it.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    set_seed,
)

from vanilla_transformer.tokenization_vanilla_transformer import (
    language_tags,
)
from vanilla_transformer_tools.evaluation.bleu_tokenizers import BleuTokenizer
from vanilla_transformer_tools.files import scratch_folder, share_weights
from vanilla_transformer_tools.saved_folder import LOG_FILE, describe_model_files, write_run
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS, VALIDATION, TrainSettings
from vanilla_transformer_tools.sharing.model_card import (
    forget_results,
    record_results,
    write_model_card,
)
from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.filters import FilteredPairs, Rule, drop_rules, filter_pairs
from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs, read_pairs
from vanilla_transformer_tools.text.token_ids import pair_lengths, tokenize_pairs
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import (
    TrainingData,
    drawn_each_epoch,
    stored,
    streamed,
)
from vanilla_transformer_tools.threads import IdleCores
from vanilla_transformer_tools.training.averaging import (
    Outcome,
    average_weights,
    averaged_checkpoints,
    best_weights,
    metric_of,
    scores_of_update,
    try_weights,
)
from vanilla_transformer_tools.training.batch_size import BatchSize, choose_batch_size
from vanilla_transformer_tools.training.budget import Decision
from vanilla_transformer_tools.training.callbacks import (
    DivergedError,
    MovingAverage,
    StopOnRequest,
    StoppedBySignalError,
    StopWithoutProgress,
    UseIdleCores,
    interrupts_stop,
)
from vanilla_transformer_tools.training.checkpoints import (
    check_optimizer,
    closed_checkpoints,
    delete_unclosed,
    failed_writes_named,
    read_state,
    update_of,
    with_intact_weights,
)
from vanilla_transformer_tools.training.curves import plot_curves
from vanilla_transformer_tools.training.fine_tuning import merge_adapter
from vanilla_transformer_tools.training.guided_alignment import guided
from vanilla_transformer_tools.training.legs import (
    check_free,
    claimed,
    continue_run,
    recorded_tokenizers,
    with_recorded_batches,
)
from vanilla_transformer_tools.training.plan import plan
from vanilla_transformer_tools.training.processes import limit_waiting
from vanilla_transformer_tools.training.progress import progress_shown
from vanilla_transformer_tools.training.r_drop import r_drop
from vanilla_transformer_tools.training.recipe import (
    check_settings,
    describe_fine_tuning,
    find_checkpoint,
    prefer_better_scores,
)
from vanilla_transformer_tools.training.run_record import JsonLinesLog, describe_run
from vanilla_transformer_tools.training.starting_model import build_model
from vanilla_transformer_tools.training.time_schedule import TimeSchedule
from vanilla_transformer_tools.training.trainer import TokenBatchTrainer, TrainingPass, scorer
from vanilla_transformer_tools.training.validation import (
    choose_tokenizers,
    joined,
    let_chrf_decide,
    load_validation,
    parallel_text,
)
from vanilla_transformer_tools.translation.sentences import has_inner_end
from vanilla_transformer_tools.translation.translator import INNER_ENDS, MOST_INNER_ENDS

# Of which the share with several sentences is counted.
_LINES_OF_SENTENCES = 10_000


def train(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    training_pass: TrainingPass | None = None,
    decisions: Sequence[Decision] = (),
) -> Path:
    """Trains tokenizers and model, or continues with saved ones, and saves the result.

    Args:
        settings: Data, sizes, vocabulary, batches.
        arguments: Trainer's arguments; `recipe` has our defaults.
        training_pass: See `TokenBatchTrainer`; None: that of the settings.
        decisions: Those of `--minutes` that are in the settings already, to be reported.

    Returns:
        The folder with the model, `arguments.output_dir`.

    Raises:
        ValueError: If settings, data and folder do not fit together; before any training.
        OSError: If a file cannot be read or written.
        DivergedError: If the loss or the weights are no longer finite; the folder then holds the
            last finite checkpoint, if there is one.
        StoppedBySignalError: After Ctrl-C or SIGTERM, when the model has been saved.
    """
    # The caller's stay as they are.
    arguments, cores, started = copy.copy(arguments), IdleCores(), time.monotonic()
    leg = _prepare(settings, arguments, training_pass, decisions)
    trainer, folder = leg.trainer, Path(arguments.output_dir)
    trainer.add_callback(UseIdleCores(cores))
    is_main = trainer.is_world_process_zero()
    stop = StopOnRequest(settings.max_minutes, settings.finish_within)
    with claimed(folder) if is_main else nullcontext(), interrupts_stop(stop):
        if is_main:
            _open_folder(folder, leg)
        cores.use(at_once=True)
        minutes_left = _add_time_schedule(leg, started, stop)
        _print_plan(leg, decisions, minutes_left)
        log = JsonLinesLog(folder / LOG_FILE, leg.run["first_update"])
        trainer.add_callback(log)
        with progress_shown(trainer, stop):
            outcome, interruption = _run(leg, stop)
        results = _results(trainer, leg.filtered, outcome, log)
        results["finished_on_request"] = stop.finishing and not interruption
        results["interrupted"] = isinstance(interruption, StoppedBySignalError)
        _save(trainer, settings.init_from, leg.run | results, outcome)
    PartialState().print(f"The model is in {folder}")
    if interruption:
        raise interruption
    return folder


@dataclass(frozen=True)
class _Leg:
    """A run, or its continuation, that is ready to train.

    Attributes:
        settings: With the batches that it has.
        run: Its record.
        checkpoint: Folder from which it continues; None for a new run.
        filtered: Training pairs; of a stream only the first ones.
        batch_size: Why it has these batches.
        trainer: With model and data.
    """

    settings: TrainSettings
    run: dict[str, Any]
    checkpoint: str | None
    filtered: FilteredPairs
    batch_size: BatchSize
    trainer: TokenBatchTrainer


def _prepare(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    training_pass: TrainingPass | None,
    decisions: Sequence[Decision],
) -> _Leg:
    """Checks a run, and reads or makes all that it needs; see `train` for the arguments."""
    # What a rule chose is not fixed yet: it has to fit the memory.
    wanted = next((one.value for one in decisions if one.option == "max_tokens_per_batch"), None)
    if wanted is not None:
        settings = dataclasses.replace(settings, max_tokens_per_batch=None)
    checkpoint, settings, run, sets = _begin(settings, arguments)
    if decisions:
        # A resumed run has those of its beginning, also on options that a leg was given.
        run.setdefault("decisions", [dataclasses.asdict(decision) for decision in decisions])
    text = parallel_text(settings, settings.train, settings.train_split)
    rules = drop_rules(settings, joined(sets))
    # Of a stream only what the tokenizer learns from is stored.
    pairs = load_pairs(text, settings.tokenizer_pairs if settings.streaming else None)
    filtered = filter_pairs(pairs, rules)
    run[INNER_ENDS] = _share_of_several_sentences(filtered.kept)
    tokenizers, model = build_model(settings, arguments, filtered.kept, checkpoint)
    number = None if settings.streaming else len(filtered.kept)
    batch_size = choose_batch_size(settings, arguments, model, number, wanted)
    settings = dataclasses.replace(settings, max_tokens_per_batch=batch_size.tokens)
    run["settings"]["max_tokens_per_batch"] = batch_size.tokens
    read = partial(_read_kept, text, rules)
    data = _build_data(settings, arguments, tokenizers, filtered.kept, read)
    if settings.r_drop:
        training_pass = partial(r_drop, alpha=settings.r_drop)
    if settings.alignments:
        data, training_pass = guided(settings, model, tokenizers, data, filtered, training_pass)
    scoring = {name: BleuTokenizer(**fields) for name, fields in run["bleu_tokenizers"].items()}
    trainer = _build_trainer(
        settings, arguments, model, tokenizers, data, sets, scoring, training_pass
    )
    if checkpoint:
        check_optimizer(Path(checkpoint), trainer.is_sharded)
    return _Leg(settings, run, checkpoint, filtered, batch_size, trainer)


def _share_of_several_sentences(pairs: Dataset) -> float:
    """Share of the sources with more than one sentence, of pairs that are spread over all."""
    lines = pairs.select(range(0, len(pairs), -(-len(pairs) // _LINES_OF_SENTENCES)))["source"]
    return round(sum(map(has_inner_end, lines)) / len(lines), 4)


def _begin(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> tuple[str | None, TrainSettings, dict[str, Any], dict[str, Dataset]]:
    """Checks a run and seeds it.

    Returns:
        The checkpoint to resume from, the settings, with which a resumed run has its own batches,
        the run's record, and the validation pairs.
    """
    check_settings(settings, arguments)
    limit_waiting(arguments)
    checkpoint = find_checkpoint(settings, arguments)
    first_update = update_of(checkpoint) if checkpoint else 0
    folder = Path(arguments.output_dir)
    recorded = {}
    if checkpoint:
        settings = with_recorded_batches(settings, folder)
        recorded = recorded_tokenizers(folder)
    sets = load_validation(settings)
    tokenizers = choose_tokenizers(settings, sets, recorded)
    let_chrf_decide(arguments, tokenizers)
    prefer_better_scores(arguments)
    run = describe_run(settings, arguments, first_update)
    run["bleu_tokenizers"] = {name: dataclasses.asdict(one) for name, one in tokenizers.items()}
    if checkpoint:
        run = continue_run(folder, run)
    set_seed(arguments.seed)
    return checkpoint, settings, run, sets


def kept_pairs(settings: TrainSettings) -> Iterator[tuple[str, ...]]:
    """One pass over the training pairs that no filter drops; nothing is stored.

    Raises:
        ValueError: If the filters drop all.
    """
    text = parallel_text(settings, settings.train, settings.train_split)
    pairs = _read_kept(text, drop_rules(settings, joined(load_validation(settings))))
    if (first := next(pairs, None)) is None:
        raise ValueError(
            "The filters must leave at least one pair, got all dropped. Leave one out."
        )
    yield first
    yield from pairs


def _read_kept(text: ParallelText, rules: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    """One pass over the pairs that no filter drops, with their tags if there are any."""
    for pair in read_pairs(text):
        if not any(drops(*pair) for drops in rules.values()):
            yield pair


def _build_data(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    tokenizers: TokenizerPair,
    pairs: Dataset,
    read: Callable[[], Iterator[tuple[str, ...]]],
) -> TrainingData:
    """Training data of the kind that the settings ask for.

    Args:
        settings: Of the run.
        arguments: Trainer's.
        tokenizers: Of source and target.
        pairs: All pairs; of a stream only the first ones.
        read: Begins a pass over a stream.
    """
    if settings.streaming:
        return streamed(read, tokenizers, settings, arguments)
    if settings.bpe_dropout:
        return drawn_each_epoch(pairs, tokenizers, settings, arguments)
    return stored(pairs, tokenizers, settings, arguments)


def _build_trainer(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    tokenizers: TokenizerPair,
    data: TrainingData,
    validation: Mapping[str, Dataset],
    scoring: Mapping[str, BleuTokenizer],
    training_pass: TrainingPass | None,
) -> TokenBatchTrainer:
    """Trainer with training data and validation sets, whose tokenizers for BLEU are `scoring`."""
    sets, scorers, longest = {}, {}, 0
    for name, pairs in validation.items():
        if settings.max_validation_pairs is not None:
            pairs = pairs.select(range(min(settings.max_validation_pairs, len(pairs))))
        tokenized, _ = tokenize_pairs(pairs, tokenizers, max_length=settings.max_length)
        # Sources of similar length are generated together, which saves steps.
        source_lengths = pair_lengths(tokenized)[:, 0]
        sets[name] = tokenized.select(np.argsort(-source_lengths, kind="stable"))
        longest = max(longest, int(source_lengths.max()))
        # Outputs have no blank ends either.
        references = list(map(without_blank_ends, sets[name]["target"]))
        scorers[name] = scorer(tokenizers.target, references, scoring[name], settings.metrics)
    if sets and arguments.generation_max_length is None:
        longest += MAX_EXTRA_TOKENS
        arguments.generation_max_length = 1 + int(
            min(longest, getattr(model.config, "last_position", math.inf))
        )
    if not arguments.predict_with_generate or arguments.prediction_loss_only:
        scorers = {}
    trainer = TokenBatchTrainer(
        data,
        tokenizers,
        training_pass,
        model=model,
        args=arguments,
        eval_dataset=sets.pop(VALIDATION, None),
        compute_metrics=scorers.pop(VALIDATION, None),
        further_sets=sets,
        scorers=scorers,
    )
    if settings.early_stopping_patience is not None:
        trainer.add_callback(StopWithoutProgress(settings.early_stopping_patience))
    return trainer


def _open_folder(folder: Path, leg: _Leg) -> None:
    """Removes what an interrupted run left, and writes what is known before training."""
    if not leg.checkpoint:
        # Another run may have finished here while the pairs were read.
        check_free(folder)
    delete_unclosed(folder)
    write_run(folder, leg.run)
    leg.filtered.write_dropped(folder)


def _add_time_schedule(leg: _Leg, started: float, stop: StopOnRequest) -> float | None:
    """Adds a schedule of time if one may be needed.

    Args:
        leg: Its trainer gets the schedule.
        started: When the leg began, by `time.monotonic`.
        stop: Ends the run.

    Returns:
        Minutes until the end; None: updates decide.
    """
    settings = leg.settings
    if settings.minutes is None and settings.finish_within is None:
        return None
    # The last weights, the mean of checkpoints, and the moving average.
    evaluations = 1
    if settings.validation:
        is_averaged = averaged_checkpoints(settings.average_last) > 1
        evaluations += is_averaged + (settings.moving_average is not None)
    schedule = TimeSchedule(settings.minutes, started, stop, leg.checkpoint, evaluations)
    leg.trainer.add_callback(schedule)
    return schedule.minutes_left


def _print_plan(leg: _Leg, decisions: Sequence[Decision], minutes_left: float | None) -> None:
    """Prints what was filtered and chosen, and what the run will take."""
    chosen = chain(map(str, decisions), describe_fine_tuning(leg.settings, leg.trainer.args))
    of_trainer = plan(leg.trainer, leg.checkpoint, minutes_left)
    share = leg.run[INNER_ENDS]
    cut = f"translate cuts lines by sentence{'' if share <= MOST_INNER_ENDS else ' if told to'}"
    sentences = [f"sentences   {share:.1%} of the sources have more than one; {cut}"]
    scoring = _describe_scoring(leg) if "bleu" in leg.settings.metrics else ()
    found = (leg.filtered.summary(), chosen, leg.batch_size.describe(), sentences, scoring)
    for line in chain(*found, of_trainer):
        PartialState().print(line)


def _describe_scoring(leg: _Leg) -> Iterator[str]:
    """BLEU's tokenizer of each validation set."""
    for name, fields in leg.run["bleu_tokenizers"].items():
        of_set = f"{name}, " if name != VALIDATION else ""
        yield f"BLEU        {of_set}tokenizer {BleuTokenizer(**fields)}"


def _run(leg: _Leg, stop: StopOnRequest) -> tuple[Outcome, BaseException | None]:
    """Trains, then puts the best weights into the model.

    Returns:
        Their description, and what ended the run early: a signal, divergence, or None.

    Raises:
        DivergedError: If there is no finite checkpoint.
    """
    trainer, settings = leg.trainer, leg.settings
    trainer.add_callback(stop)
    moving_average = None
    if settings.moving_average is not None:
        moving_average = MovingAverage(settings.moving_average)
        trainer.add_callback(moving_average)
    try:
        trainer.train(resume_from_checkpoint=leg.checkpoint)
        outcome = best_weights(trainer)
        trainer.check_weights()
        if not stop.is_interrupted(trainer.args):
            outcome = average_weights(trainer, settings.average_last, outcome)
        if moving_average and not stop.is_interrupted(trainer.args):
            name = f"exponential moving average, {settings.moving_average}"
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
    """Loads the last finite weights of a run that diverged; returns them and the error to raise.

    Raises:
        DivergedError: If there are none.
    """
    folder = Path(trainer.args.output_dir)
    advice = (
        f"Lower --learning_rate, now {trainer.args.learning_rate:g}, or lengthen --warmup_steps, "
        f"now {trainer.args.warmup_steps:g}, and train anew in another folder"
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
    return {
        **trainer.data.record(trainer.state.epoch or 0),
        "dropped_pairs": filtered.dropped,
        "target_languages": list(language_tags(trainer.tokenizers.source)),
        "trained_parameters": _model_of(trainer).num_parameters(only_trainable=True),
        "updates": trainer.state.global_step,
        "weights": outcome.weights,
        "minutes": round(log.minutes, 1),
    }


def _model_of(trainer: TokenBatchTrainer) -> PreTrainedModel:
    return trainer.accelerator.unwrap_model(trainer.model)


def _save(
    trainer: TokenBatchTrainer, base: str | None, run: Mapping[str, Any], outcome: Outcome
) -> None:
    """Writes the model's folder; each file appears whole or not at all.

    All processes call it, because each may have a part of the weights.

    Args:
        trainer: After training.
        base: Folder or Hub name of the model that an adapter was trained for.
        run: Its record.
        outcome: Its scores.
    """
    weights: dict[str, Tensor] | None = None
    if trainer.is_sharded:
        # Empty in all processes but the main one.
        weights = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir)
    model = _model_of(trainer)
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
