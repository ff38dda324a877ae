"""Whether a run is possible: all rules about settings and Trainer's arguments, in one place."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets.config import DATASET_STATE_JSON_FILENAME
from transformers import Seq2SeqTrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_flash_attn_2_available, is_peft_available

from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
from vanilla_transformer_tools.evaluation.metrics import METRICS, build_metrics
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.averaging import metric_of, split_metric
from vanilla_transformer_tools.training.optimizer import ADAM
from vanilla_transformer_tools.training.recipe import BY_TIME, config_overrides

# Least value of a setting, and what it must be below.
_RANGES = {
    "max_validation_pairs": (1, math.inf),
    "shuffle_buffer": (1, math.inf),
    "tokenizer_pairs": (1, math.inf),
    "filter_max_characters": (1, math.inf),
    "filter_max_ratio": (1, math.inf),
    "bpe_dropout": (0, 1),
    "max_length": (2, math.inf),
    "max_tokens_per_batch": (1, math.inf),
    "max_minutes": (0, math.inf),
    "finish_within": (0, math.inf),
    "average_last": (0, math.inf),
    "moving_average": (0, 1),
    "r_drop": (0, math.inf),
    "lora_rank": (1, math.inf),
    "lora_alpha": (0, math.inf),
    "lora_dropout": (0, 1),
    "early_stopping_patience": (1, math.inf),
    "learning_rate": (0, math.inf),
    "warmup_steps": (0, math.inf),
    "weight_decay": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "label_smoothing_factor": (0, 1),
    "gradient_accumulation_steps": (1, math.inf),
    "per_device_eval_batch_size": (1, math.inf),
}

# Options of Trainer that nothing here would follow, and why.
_OF_NO_USE = {
    "per_device_train_batch_size": "batches have unequal numbers of pairs, and "
    "--max_tokens_per_batch is their size",
    "train_sampling_strategy": "batches are always of pairs of similar length, in random order",
    "auto_find_batch_size": "batches fit the memory unless --max_tokens_per_batch is given",
    "dataloader_drop_last": "each pair is trained on once in an epoch",
    "remove_unused_columns": "the text of the pairs is no input of the model",
    "eval_do_concat_batches": "scores are of all validation pairs together",
    "batch_eval_metrics": "scores are of all validation pairs together",
}

# Schedules that are no function of the update.
_BY_LOSS = {"reduce_lr_on_plateau", "greedy"}


def check_settings(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> None:
    """Rejects settings that no run can follow, before anything is read.

    Args:
        settings: Our settings.
        arguments: Trainer's arguments.

    Raises:
        ValueError: If there are any; the message names all.
    """
    faults = [
        *_faults_of_ranges(settings, arguments),
        *_faults_of_trainer(settings, arguments),
        *_faults_of_data(settings, arguments),
        *_faults_of_vocabularies(settings),
        *_faults_of_schedules(settings, arguments),
        *_faults_of_fine_tuning(settings),
        *_faults_of_scores(settings, arguments),
    ]
    try:
        config_overrides(settings)
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _faults_of_ranges(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Numbers that are too small or too large."""
    for given in (settings, arguments):
        for name, (least, limit) in _RANGES.items():
            value = getattr(given, name, None)
            # Every comparison with NaN is false, so NaN is refused.
            if value is not None and not least <= value < limit:
                bound = f"below {limit:g}" if limit < math.inf else "finite"
                yield f"--{name} must be at least {least} and {bound}, got {value}."
    if not (arguments.max_steps > 0 or arguments.num_train_epochs > 0):
        yield (
            "--num_train_epochs or --max_steps must be above 0, got "
            f"{arguments.num_train_epochs} and {arguments.max_steps}."
        )


def _faults_of_trainer(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Options of Trainer that would do nothing here, or what nobody wants, and devices."""
    if arguments.push_to_hub:
        yield (
            "--push_to_hub uploads whatever lies in the folder, after each checkpoint. Leave it "
            "out, and share the finished model: vanilla-transformer push."
        )
    if arguments.resume_from_checkpoint is not None:
        yield (
            "--resume_from_checkpoint must be left out: --resume continues the run in --output_dir "
            "from its last checkpoint, and --init_from begins a new one."
        )
    if arguments.save_strategy == SaveStrategy.BEST:
        yield (
            "--save_strategy best leaves nothing to resume from between two of the best scores. "
            "Give steps or epoch; the best checkpoint is kept along with the last ones."
        )
    for name, reason in _OF_NO_USE.items():
        default, value = (getattr(of, name, None) for of in (Seq2SeqTrainingArguments, arguments))
        if value != default:
            yield f"--{name} must be left out: {reason}, got {value}."
    if not arguments.save_steps > 0:
        yield (
            f"--save_steps must be above 0, got {arguments.save_steps}. For no checkpoints at all "
            "there is --save_strategy no."
        )
    if settings.optimizer and arguments.optim not in ADAM:
        yield (
            f"--optimizer {settings.optimizer} goes with Adam, --optim {' or '.join(ADAM)}, got "
            f"{arguments.optim.value}. Leave one of the two out."
        )
    missing = set(arguments.report_to) - set(get_available_reporting_integrations())
    for name in sorted(missing):
        yield f"--report_to {name} needs the package {name}. Install it: pip install {name}"
    if arguments.n_gpu > 1:
        yield (
            f"Each GPU needs a process of its own, got one process for {arguments.n_gpu}. Train by "
            f"`accelerate launch --num_processes {arguments.n_gpu} scripts/train.py` with the same "
            "options, or on one GPU, with CUDA_VISIBLE_DEVICES=0."
        )
    if arguments.torch_compile and settings.compile_layers:
        yield (
            "--torch_compile compiles the whole model and --compile_layers its layers, got both. "
            "Leave one of the two out."
        )
    if settings.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
        yield (
            "--attn_implementation flash_attention_2 needs the package flash-attn, which is not "
            "installed. Install it, or leave the option out."
        )


def _faults_of_data(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> Iterator[str]:
    """Pairs that cannot be read as asked for, and filters without anything to compare with."""
    for path in sorted({*settings.train} & {*settings.validation}):
        # A saved dataset of one split has no validation pairs beside those for training.
        if Path(path, DATASET_STATE_JSON_FILENAME).is_file():
            yield (
                f"--validation must hold other pairs than --train, got {path!r} for both, which "
                "has one split. Split it first: Dataset.train_test_split."
            )
    scripts = settings.filter_script
    if scripts is not None and len(scripts) != 2:
        yield (
            f"--filter_script takes two scripts, of the source and of the target, got {scripts}."
        )
    if settings.filter_overlap == [] and not settings.validation:
        yield (
            "--filter_overlap needs evaluation pairs to compare with, got none. Give --validation, "
            "or files after it."
        )
    if settings.bpe_dropout and arguments.dataloader_persistent_workers:
        yield (
            "--bpe_dropout draws each epoch again, and persistent workers would keep the first "
            "one. Leave --dataloader_persistent_workers out."
        )
    if settings.streaming:
        if arguments.max_steps < 1:
            yield (
                "--streaming needs --max_steps, the number of updates, got "
                f"{arguments.max_steps}: the length of an epoch of a stream is unknown."
            )
        if settings.bpe_dropout:
            yield (
                f"--bpe_dropout needs all words of the corpus in advance, got "
                f"{settings.bpe_dropout} with --streaming. Leave one of the two out."
            )
        if settings.filter_duplicates:
            yield (
                "--filter_duplicates remembers all pairs, and --streaming stores none. Leave one "
                "of the two out."
            )
    if settings.alignments:
        excluded = {
            "--streaming": (settings.streaming, "its pairs are not numbered"),
            "--bpe_dropout": (settings.bpe_dropout, "it splits the words again in each epoch"),
            "--compile_layers": (settings.compile_layers, "it hides the attention of a head"),
            "--torch_compile": (arguments.torch_compile, "it hides the attention of a head"),
        }
        for option, (is_given, reason) in excluded.items():
            if is_given:
                yield f"--alignments excludes {option}, since {reason}. Leave one of the two out."


def _faults_of_vocabularies(settings: TrainSettings) -> Iterator[str]:
    """Vocabularies and languages that contradict each other."""
    if settings.target_vocab_size is not None and not settings.separate_vocabularies:
        yield (
            "--target_vocab_size needs --separate_vocabularies, got "
            f"only {settings.target_vocab_size}. Add that, or set --vocab_size."
        )
    if not (settings.init_from or settings.tokenizer):
        for name in ("source_language", "target_language"):
            if (value := getattr(settings, name)) is not None:
                yield (
                    f"--{name} needs the tokenizers of a saved model, got {value!r} for new ones. "
                    "Give --init_from or --tokenizer; or --tag_column, for a model of several "
                    "directions."
                )
    elif settings.tag_column and settings.target_language is not None:
        yield (
            "--target_language is for all pairs, and --tag_column names one for each pair, got "
            f"{settings.target_language!r} and {settings.tag_column!r}. Leave one of the two out."
        )
    if settings.symbols and (settings.tokenizer or settings.init_from):
        yield (
            "--symbols needs a new vocabulary, got --tokenizer or --init_from too, which bring "
            "their own. Leave one of the two out."
        )
    if settings.tokenizer and settings.init_from:
        yield (
            f"--tokenizer must be left out with --init_from, which keeps the tokenizers of "
            f"{settings.init_from!r}, got {settings.tokenizer!r}."
        )


def _faults_of_schedules(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Schedules that contradict each other."""
    if settings.minutes is not None:
        yield from _faults_of_minutes(settings, arguments)
    schedule = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    if settings.finish_within is not None and schedule in _BY_LOSS:
        yield (
            f"--finish_within needs a schedule that the number of updates decides, got "
            f"--lr_scheduler_type {schedule}, where the loss does. Leave one of the two out."
        )
    try:
        get_scheduler(
            schedule,
            torch.optim.SGD([torch.zeros(1)]),
            num_warmup_steps=1,
            num_training_steps=10**9,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
    except (TypeError, ValueError) as error:
        yield (
            f"--lr_scheduler_kwargs must fit --lr_scheduler_type {schedule}, got "
            f"{arguments.lr_scheduler_kwargs or {}}: {error}."
        )


def _faults_of_scores(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Scores that nothing computes."""
    for name in ("moving_average", "early_stopping_patience"):
        if getattr(settings, name) is None:
            continue
        if not settings.validation:
            yield f"--{name} needs --validation pairs to score on, got none. Add them."
        elif arguments.eval_strategy == "no":
            yield f"--{name} needs scores, got --eval_strategy no. Leave one of the two out."
    try:
        # The references, by which auto chooses, have not been read yet.
        build_metrics(settings.metrics, resolve(settings.bleu_tokenize, []).name)
        sets = settings.paths_of_validation()
    except ValueError as error:
        yield f"--bleu_tokenize: {error}"
        return
    if settings.validation_sets and not settings.validation:
        yield "--validation_sets are further sets besides --validation, got none. Add it."
    prefix, metric = split_metric(metric_of(arguments))
    if settings.validation and (metric not in ("loss", *METRICS) or prefix[:-1] not in ("", *sets)):
        yield (
            f"--metric_for_best_model must be loss or one of {', '.join(METRICS)}, or one "
            f"of --validation_sets after its name, as in NAME_bleu, got {prefix}{metric}."
        )
    if metric in METRICS and arguments.prediction_loss_only:
        yield f"--prediction_loss_only computes no {metric}. Add --metric_for_best_model loss."
    if metric in METRICS and metric not in settings.metrics:
        yield (
            f"--metric_for_best_model must be one of --metrics, got {metric} and "
            f"{' '.join(settings.metrics)}. Add it to --metrics."
        )
    if metric in METRICS and not arguments.predict_with_generate:
        yield (
            "--metric_for_best_model must be loss with --predict_with_generate false, got "
            f"{metric}, which scores generated text. Change either one."
        )


def _faults_of_minutes(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Minutes without time, and settings that contradict a schedule of time."""
    minutes = settings.minutes or 0.0
    # False for NaN too.
    if not 0 < minutes < math.inf:
        yield f"--minutes must be above 0 and finite, got {minutes}."
    lengths = {name: getattr(arguments, name) for name in (*BY_TIME, "max_steps")}
    lengths |= {"max_minutes": settings.max_minutes, "streaming": settings.streaming}
    free: dict[str, Any] = BY_TIME | {"max_steps": -1, "max_minutes": None, "streaming": False}
    given = [
        # The name of a schedule is an enum.
        f"--{name} {getattr(value, 'value', value)}"
        for name, value in lengths.items()
        if value != free[name]
    ]
    if given:
        yield (
            f"--minutes decides when the run ends and how its learning rate falls, got "
            f"--minutes {minutes:g} and {', '.join(given)}. Leave either out."
        )
    for name in ("warmup_steps", "eval_steps", "save_steps"):
        if 0 < (getattr(arguments, name) or 0) < 1:
            yield (
                f"--{name} must be a number of updates with --minutes, whose length is unknown, "
                f"got the share {getattr(arguments, name):g}."
            )
    if settings.init_from:
        yield (
            f"--minutes chooses the size of a new model, got --init_from {settings.init_from}. "
            "Fine-tune with --max_steps and --lr_scheduler_type linear, or with --max_minutes."
        )


def _faults_of_fine_tuning(settings: TrainSettings) -> Iterator[str]:
    """Settings of fine-tuning that contradict each other or have no effect."""
    for name in ("freeze", "peft"):
        value = getattr(settings, name)
        if value and not settings.init_from:
            yield f"--{name} needs the model of --init_from, got {value} without it. Add it."
    if settings.peft and not is_peft_available():
        yield "--peft needs the package peft. Install it: pip install -e '.[peft]'"
    if settings.peft and settings.freeze:
        yield (
            "--freeze must be left out with --peft, which trains adapters and freezes everything "
            f"else, got {' '.join(settings.freeze)}. Choose layers by --lora_target_modules."
        )
    for field in dataclasses.fields(settings):
        is_used = settings.peft or not field.name.startswith("lora_")
        if not is_used and (value := getattr(settings, field.name)) != field.default:
            yield f"--{field.name} needs --peft lora, got {value} without it. Add it."
