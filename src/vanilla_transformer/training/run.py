"""Training from parallel text to a saved model: the recipe of section 5 of the paper.

Differs from the paper:
    A run is measured in epochs, and its checkpoints are taken at their ends; the paper fixes the
    number of updates, and takes one every ten minutes. The mean of the last ones is saved, as in
    the paper, unless it does worse on the validation pairs than the best one alone.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    TrainerState,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

from vanilla_transformer.data.batches import Lengths, TokenBatchSampler
from vanilla_transformer.data.bpe_dropout import SegmentedPairs
from vanilla_transformer.data.filters import Rule, drop_rules, filter_pairs
from vanilla_transformer.data.parallel_text import (
    ParallelText,
    load_pairs,
    pair_lengths,
    read_pairs,
    tokenize_pairs,
)
from vanilla_transformer.data.streaming import TokenBatchStream
from vanilla_transformer.files import scratch_folder
from vanilla_transformer.model_folder import LOG_FILE, describe_model_files, load_model
from vanilla_transformer.modeling.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.sharing.model_card import record_results, write_model_card
from vanilla_transformer.tokenization.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
    language_tags,
)
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair
from vanilla_transformer.training.averaging import (
    Outcome,
    average_weights,
    best_weights,
    metric_of,
    scores_of_update,
    try_weights,
)
from vanilla_transformer.training.callbacks import (
    DivergedError,
    MovingAverage,
    StopOnRequest,
    StoppedBySignalError,
    interrupts_stop,
)
from vanilla_transformer.training.checkpoints import (
    closed_checkpoints,
    delete_unclosed,
    failed_writes_named,
)
from vanilla_transformer.training.curves import plot_curves
from vanilla_transformer.training.legs import (
    check_free,
    claimed,
    continue_run,
    write_run,
)
from vanilla_transformer.training.recipe import (
    check_settings,
    check_vocabularies,
    config_overrides,
    find_checkpoint,
    prefer_better_scores,
)
from vanilla_transformer.training.run_record import JsonLinesLog, describe_run
from vanilla_transformer.training.trainer import TokenBatchTrainer, plan, scorer
from vanilla_transformer_cli.settings import PRESETS, TrainSettings

# Section 6.1: beam 4, length penalty 0.6, output at most 50 tokens longer than its source.
NUM_BEAMS = 4
LENGTH_PENALTY = 0.6
MAX_EXTRA_TOKENS = 50


def train(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> Path:
    """Trains tokenizers and model, or goes on with saved ones, and saves what came out.

    Args:
        settings: Data, sizes, vocabulary, batches.
        arguments: Everything that Trainer knows; `recipe` has our defaults.

    Returns:
        The folder with the model, `arguments.output_dir`.

    Raises:
        ValueError: If settings, data and folder do not fit together; before any training.
        OSError: If a file cannot be read or written.
        DivergedError: If the loss or the weights stop being finite; the folder then holds the
            last finite checkpoint, if there is one.
        StoppedBySignalError: After Ctrl-C or SIGTERM, when the model has been saved.
    """
    # A caller's stay as they are.
    arguments = copy.copy(arguments)
    overrides = config_overrides(settings)
    check_settings(settings, arguments)
    prefer_better_scores(arguments)
    folder = Path(arguments.output_dir)
    checkpoint = find_checkpoint(settings, arguments)
    first_update = int(checkpoint.rpartition("-")[2]) if checkpoint else 0
    run = describe_run(settings, arguments, first_update)
    if checkpoint:
        run = continue_run(folder, run)
    set_seed(arguments.seed)
    validation_pairs = _load_validation(settings)
    rules = drop_rules(settings, validation_pairs)
    text = _text(settings, settings.train, settings.train_split)
    # Of a stream only what the tokenizer learns from is stored.
    first = settings.tokenizer_pairs if settings.streaming else None
    filtered = filter_pairs(load_pairs(text, first), rules)
    kept = filtered.kept
    if start := checkpoint or settings.init_from:
        model = load_model(start)
        tokenizers = TokenizerPair.from_pretrained(start)
        check_vocabularies(settings, start, tokenizers)
    else:
        tokenizers = _train_tokenizers(settings, kept)
        model = _build_model(settings, overrides, tokenizers)
    if settings.attn_implementation:
        model.set_attn_implementation(settings.attn_implementation)
    # The model smooths its own loss, without the full logits that Trainer's smoother needs.
    model.config.label_smoothing = arguments.label_smoothing_factor
    arguments.label_smoothing_factor = 0.0

    pairs = partial(_read_kept, text, rules) if settings.streaming else kept
    trainer, truncated = _build_trainer(
        settings, arguments, model, tokenizers, pairs, validation_pairs
    )
    say = PartialState().print
    is_main = trainer.is_world_process_zero()
    stop = StopOnRequest(settings.max_minutes)
    with claimed(folder) if is_main else nullcontext(), interrupts_stop(stop):
        if is_main:
            if not checkpoint:
                # Another run may have come to its end here while the pairs were read.
                check_free(folder)
            delete_unclosed(folder)
            write_run(folder, run)
            filtered.write_dropped(folder)
        for line in chain(filtered.summary(), plan(trainer, truncated, checkpoint)):
            say(line)
        log = JsonLinesLog(folder / LOG_FILE, first_update)
        trainer.add_callback(log)
        outcome, interruption = _run(trainer, settings, checkpoint, stop)
        if is_main:
            counts: dict[str, Any] = {"pairs": len(kept), "truncated_pairs": truncated}
            counts["epochs"] = round(trainer.state.epoch or 0, 2)
            if settings.streaming:
                # Of a stream nobody knows them.
                counts = dict.fromkeys(counts)
            run |= {
                **counts,
                "dropped_pairs": filtered.dropped,
                "target_languages": list(language_tags(tokenizers.source)),
                "parameters": model.num_parameters(),
                "updates": trainer.state.global_step,
                "weights": outcome.weights,
                "minutes": round(log.minutes, 1),
            }
            _save(trainer, run, outcome, folder)
    say(f"The model is in {folder}")
    if interruption:
        raise interruption
    return folder


def _load_validation(settings: TrainSettings) -> Dataset | None:
    if not settings.validation:
        return None
    return load_pairs(_text(settings, settings.validation, settings.validation_split))


def _run(
    trainer: TokenBatchTrainer,
    settings: TrainSettings,
    checkpoint: str | None,
    stop: StopOnRequest,
) -> tuple[Outcome, BaseException | None]:
    """Trains, then puts the best weights that there are into the model.

    Returns:
        What they are, and what ended the run before its time: a signal, or divergence.

    Raises:
        DivergedError: If there is no finite checkpoint.
    """
    trainer.add_callback(stop)
    moving_average = None
    if settings.moving_average is not None:
        moving_average = MovingAverage(settings.moving_average)
        trainer.add_callback(moving_average)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        outcome = best_weights(trainer)
        trainer.check_weights()
        if not stop.interrupted:
            outcome = average_weights(trainer, settings.average_last, outcome)
        if moving_average and not stop.interrupted:
            name = f"exponential moving average, {settings.moving_average}"
            outcome = try_weights(trainer, moving_average.weights, name, outcome)
    except StoppedBySignalError as error:
        trainer.check_weights()
        return Outcome("last update"), error
    except DivergedError as error:
        return _back_to_last_checkpoint(trainer, error)
    return outcome, StoppedBySignalError(stop.signum) if stop.interrupted else None


def _back_to_last_checkpoint(
    trainer: TokenBatchTrainer, error: DivergedError
) -> tuple[Outcome, DivergedError]:
    """The last finite weights of a run that diverged, and what its user can do.

    Raises:
        DivergedError: If there are none.
    """
    folder = Path(trainer.args.output_dir)
    advice = (
        f"Lower --learning_rate, now {trainer.args.learning_rate:g}, or lengthen --warmup_steps, "
        f"now {trainer.args.warmup_steps:g}, and train anew in another folder"
    )
    checkpoints = closed_checkpoints(folder)
    if not checkpoints:
        raise DivergedError(
            f"Training diverged: {error}, before there was a checkpoint. {folder} holds no model. "
            f"{advice}."
        ) from error
    last = checkpoints[-1]
    trainer._load_from_checkpoint(str(last))
    trainer.state = TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))
    outcome = Outcome(
        f"{last.name}, before training diverged",
        scores_of_update(trainer, trainer.state.global_step),
    )
    return outcome, DivergedError(
        f"Training diverged: {error}. {folder} holds the weights of {last.name}, the last finite "
        f"ones. {advice}, from here with --init_from {folder}."
    )


def _text(settings: TrainSettings, paths: list[str], split: str) -> ParallelText:
    return ParallelText(
        tuple(paths),
        settings.source_column,
        settings.target_column,
        settings.dataset_config,
        split,
        settings.streaming,
        settings.tag_column,
    )


def _read_kept(text: ParallelText, rules: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    """One pass over the pairs that no filter drops."""
    for source, target in read_pairs(text):
        if not any(drops(source, target) for drops in rules.values()):
            yield source, target


def _train_tokenizers(settings: TrainSettings, pairs: Dataset) -> TokenizerPair:
    """Learns a joint vocabulary, or one of each side; every process learns the same."""

    def learn(
        columns: Sequence[str], vocab_size: int, languages: Sequence[str]
    ) -> VanillaTransformerTokenizer:
        return VanillaTransformerTokenizer.train(
            (text for column in columns for text in pairs[column]),
            vocab_size=vocab_size,
            kind=settings.tokenizer_kind,
            pretokenized=settings.pretokenized,
            target_languages=languages,
        )

    # Tags stand in front of sources.
    languages = sorted(set(pairs["tag"])) if settings.tag_column else []
    if settings.separate_vocabularies:
        return TokenizerPair(
            learn(["source"], settings.vocab_size, languages),
            learn(["target"], settings.target_vocab_size or settings.vocab_size, []),
        )
    return TokenizerPair.joint(learn(["source", "target"], settings.vocab_size, languages))


def _build_model(
    settings: TrainSettings, overrides: dict[str, Any], tokenizers: TokenizerPair
) -> VanillaTransformerForConditionalGeneration:
    fields: dict[str, Any] = {**PRESETS[settings.preset].config(), **overrides}
    fields["vocab_size"] = len(tokenizers.source)
    if not tokenizers.is_joint:
        fields["share_encoder_decoder_embeddings"] = False
        fields["decoder_vocab_size"] = len(tokenizers.target)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))
    model.generation_config.update(
        num_beams=NUM_BEAMS,
        length_penalty=LENGTH_PENALTY,
        # The start token, and the longest output that the longest source may have.
        max_length=1 + settings.max_length + MAX_EXTRA_TOKENS,
    )
    return model


def _build_trainer(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    model: PreTrainedModel,
    tokenizers: TokenizerPair,
    train_pairs: Dataset | Callable[[], Iterator[tuple[str, str]]],
    validation_pairs: Dataset | None,
) -> tuple["TokenBatchTrainer", int]:
    """Tokenises the pairs and puts the trainer together; tells how many pairs were cut off.

    Training pairs that are a function, which reads them anew for each pass, are streamed.
    """
    share: dict[str, Any] = {
        "max_tokens": settings.max_tokens_per_batch,
        "seed": arguments.seed,
        "num_processes": arguments.world_size,
        "process_index": arguments.process_index,
    }
    train_set: Dataset | SegmentedPairs | TokenBatchStream
    sampler = None
    if callable(train_pairs):
        train_set = TokenBatchStream(
            train_pairs,
            tokenizers,
            max_length=settings.max_length,
            buffer_size=settings.shuffle_buffer,
            **share,
        )
        truncated = train_set.truncated_pairs
    else:
        train_set, lengths, truncated = _tokenize(settings, arguments, train_pairs, tokenizers)
        sampler = TokenBatchSampler(lengths, **share)
    validation_set = score = None
    if validation_pairs is not None:
        if settings.max_validation_pairs is not None:
            validation_pairs = validation_pairs.take(settings.max_validation_pairs)
        validation_set, _ = tokenize_pairs(
            validation_pairs, tokenizers, max_length=settings.max_length
        )
        # Sources of like length are generated together, which saves steps.
        source_lengths = pair_lengths(validation_set)[:, 0]
        validation_set = validation_set.select(np.argsort(-source_lengths, kind="stable"))
        score = scorer(
            tokenizers.target,
            list(validation_set["target"]),
            settings.bleu_tokenize,
            settings.metrics,
        )
        if arguments.generation_max_length is None:
            arguments.generation_max_length = 1 + int(source_lengths.max()) + MAX_EXTRA_TOKENS
    trainer = TokenBatchTrainer(
        sampler,
        tokenizers,
        settings.r_drop,
        model=model,
        args=arguments,
        train_dataset=train_set,
        eval_dataset=validation_set,
        compute_metrics=score if arguments.predict_with_generate else None,
    )
    if settings.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(settings.early_stopping_patience))
    return trainer, truncated


def _tokenize(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    pairs: Dataset,
    tokenizers: TokenizerPair,
) -> tuple[Dataset | SegmentedPairs, Lengths | Callable[[int], Lengths], int]:
    """Token ids of the training pairs, their lengths, and how many of them were cut off.

    Under BPE-dropout ids and lengths are those of an epoch.
    """
    if not settings.bpe_dropout:
        tokenized, truncated = tokenize_pairs(pairs, tokenizers, max_length=settings.max_length)
        return tokenized.select_columns(["input_ids", "labels"]), pair_lengths(tokenized), truncated
    if arguments.dataloader_persistent_workers:
        raise ValueError(
            "--bpe_dropout draws each epoch anew, and persistent workers would go on with the "
            "first one. Leave --dataloader_persistent_workers out."
        )
    drawn = SegmentedPairs(
        tokenizers,
        pairs["source"][:],
        pairs["target"][:],
        rate=settings.bpe_dropout,
        seed=arguments.seed,
        max_length=settings.max_length,
        languages=pairs["tag"][:] if settings.tag_column else None,
    )
    return drawn, drawn.draw, drawn.truncated_pairs


def _save(
    trainer: TokenBatchTrainer,
    run: dict[str, Any],
    outcome: Outcome,
    folder: Path,
) -> None:
    """Writes the model's folder; each file appears whole or not at all."""
    with scratch_folder(folder, ".saving-") as unfinished:
        with failed_writes_named(folder):
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(unfinished)
            trainer.tokenizers.save_pretrained(unfinished)
        # Checksums of earlier files would not be those of the new ones that are put there now.
        write_run(folder, {**run, "files": {}})
        files = describe_model_files(unfinished)
        for file in sorted(unfinished.rglob("*")):
            place = folder / file.relative_to(unfinished)
            if file.is_dir():
                place.mkdir(exist_ok=True)
            else:
                file.replace(place)
    write_run(folder, {**run, "files": files})
    # A loss alone is no result for the card.
    if outcome.scores and trainer.compute_metrics:
        search = {"search": f"greedy, {outcome.weights}"}
        record_results(folder, "validation", outcome.scores | search)
    else:
        write_model_card(folder)
    try:
        plot_curves(folder, metric_of(trainer.args))
    except ImportError as error:
        PartialState().print(str(error))
