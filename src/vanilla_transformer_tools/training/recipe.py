"""The recipe: defaults of a run, and checks before anything is read or trained."""

import dataclasses
import difflib
import json
import math
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets.config import DATASET_STATE_JSON_FILENAME
from transformers import Seq2SeqTrainingArguments, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy
from transformers.utils import (
    is_flash_attn_2_available,
    is_peft_available,
    is_torch_tf32_available,
)

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.packing_vanilla_transformer import VARLEN
from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
from vanilla_transformer_tools.evaluation.metrics import METRICS, build_metrics
from vanilla_transformer_tools.saved_folder import gpu_computes_bfloat16
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.text.languages import language_codes
from vanilla_transformer_tools.text.streaming import check_streaming
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.averaging import (
    averaged_checkpoints,
    metric_of,
    split_metric,
)
from vanilla_transformer_tools.training.checkpoints import resumable_checkpoint
from vanilla_transformer_tools.training.guided_alignment import faults_of_alignments
from vanilla_transformer_tools.training.legs import check_free

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

# Config fields that the command line sets by other options.
_SET_ELSEWHERE = {
    "vocab_size": "--vocab_size",
    "decoder_vocab_size": "--separate_vocabularies with --target_vocab_size",
    "label_smoothing": "--label_smoothing_factor",
    "dtype": "--bf16 or --fp16",
}


# For a saved model: within the 2e-5 to 2e-4 at which large pretrained ones are usually fine-tuned.
# An adapter, which begins at zero, needs about ten times as much.
_FINE_TUNING = {"learning_rate": 1e-4, "warmup_steps": 100}
_ADAPTER_RATE = 1e-3

# Schedules that are no function of the update.
_BY_LOSS = {"reduce_lr_on_plateau", "greedy"}

# With --minutes, `TimeSchedule` makes the rate fall and ends the run.
_BY_TIME: dict[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup",
    "num_train_epochs": 1_000_000,
}


def recipe(settings: TrainSettings) -> dict[str, Any]:
    """Defaults of a run for `Seq2SeqTrainingArguments`: section 5 of the paper.

    With Transformers' default timescale, `inverse_sqrt` is equation (3), scaled so that
    `learning_rate` is its peak.
    """
    arguments: dict[str, Any] = {
        "output_dir": "runs/model",
        "num_train_epochs": 30,
        **_schedule(settings),
        "lr_scheduler_type": "inverse_sqrt",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "weight_decay": 0.0,
        "label_smoothing_factor": 0.1,
        "logging_steps": 50,
        # The filter would hide a loss that is not finite: it reports the mean of earlier ones.
        "logging_nan_inf_filter": False,
        "save_strategy": "epoch",
        "save_total_limit": _kept_checkpoints(settings),
        "report_to": "none",
        **_of_the_machine(settings),
        # Every weight takes part in every update, so no process need search for the others.
        "ddp_find_unused_parameters": False,
        # Seconds that processes wait for one that does not answer. The longest pause is before the
        # first update, while some still read their pairs.
        "ddp_timeout": 600,
    }
    if settings.validation:
        arguments |= {
            "eval_strategy": "epoch",
            "load_best_model_at_end": True,
            "metric_for_best_model": settings.metrics[0],
            "predict_with_generate": True,
            "generation_num_beams": 1,
            "per_device_eval_batch_size": 64,
        }
    if settings.minutes is not None:
        arguments |= _BY_TIME
    if settings.streaming or settings.minutes is not None:
        # A stream has no epochs; those of a run of minutes may be longer than the run.
        arguments |= {"save_strategy": "steps", "save_steps": 1000}
        if settings.validation:
            arguments |= {"eval_strategy": "steps", "eval_steps": 1000}
    return arguments


def in_step(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that agree with what the user gave.

    Each evaluation is of a checkpoint: strategy and interval of one of them are those of the other,
    and an interval implies the strategy `steps`. Without either there is no best checkpoint.

    Args:
        defaults: By the names of Trainer's arguments.
        given: What the user gave, likewise.
    """
    defaults = dict(defaults)
    if given.get("fp16"):
        # Only one of the two can be on, and bf16 is merely a default.
        defaults["bf16"] = False
    intervals = {"eval_strategy": "eval_steps", "save_strategy": "save_steps"}
    of_both = [name for name in intervals if name in defaults]
    strategies = [given[name] for name in of_both if name in given]
    steps = [given[name] for name in intervals.values() if name in given]
    if "no" in strategies:
        defaults["load_best_model_at_end"] = False
    elif len(strategies) == 1:
        defaults |= dict.fromkeys(of_both, strategies[0])
    elif steps and not strategies:
        defaults |= dict.fromkeys(of_both, "steps")
    if len(steps) == 1 and {**defaults, **given}["save_strategy"] == "steps":
        defaults |= {intervals[name]: steps[0] for name in of_both}
    return defaults


def _kept_checkpoints(settings: TrainSettings) -> int:
    """Number of those to average; Trainer counts the best checkpoint too."""
    last = averaged_checkpoints(settings.average_last)
    # Trainer takes 0 for all.
    return max(1, last + bool(settings.validation))


def _schedule(settings: TrainSettings) -> dict[str, float]:
    """Default peak of the learning rate and updates until it."""
    if not settings.init_from:
        preset = PRESETS[settings.preset]
        return {"learning_rate": preset.learning_rate, "warmup_steps": preset.warmup_steps}
    return _FINE_TUNING | ({"learning_rate": _ADAPTER_RATE} if settings.peft else {})


def describe_fine_tuning(settings: TrainSettings, arguments: TrainingArguments) -> Iterator[str]:
    """The learning rate of a run that starts from a saved model; nothing for other runs."""
    if settings.init_from:
        defaults = _schedule(settings)
        given = [name for name, value in defaults.items() if getattr(arguments, name) != value]
        yield (
            f"rate        {arguments.learning_rate:g} after {arguments.warmup_steps:g} updates of "
            f"warm-up{'' if given else ', the defaults with --init_from'}"
        )


def _of_the_machine(settings: TrainSettings) -> dict[str, Any]:
    """Defaults that depend on the device."""
    return {
        "dataloader_pin_memory": torch.cuda.is_available(),
        "dataloader_num_workers": _workers(settings),
        # The products that bf16 leaves in float32. None: as torch is set to.
        "tf32": True if is_torch_tf32_available() else None,
        # Transformers accepts bf16 on a CPU only with `use_cpu`.
        "use_cpu": not torch.accelerator.is_available(),
        "bf16": _bf16_pays(),
    }


def _workers(settings: TrainSettings) -> int:
    """Processes that pad batches while a GPU works; on a CPU they would take cores from training.

    Each worker of a stream reads all of it.
    """
    if not torch.cuda.is_available():
        return 0
    return 1 if settings.streaming else 2


def dtype_of_products(arguments: TrainingArguments) -> torch.dtype:
    """Type in which a run computes its matrix products."""
    if arguments.bf16:
        return torch.bfloat16
    return torch.float16 if arguments.fp16 else torch.float32


def _bf16_pays() -> bool:
    """Whether matrix products are faster in bfloat16 on this machine; some devices emulate them."""
    if torch.cuda.is_available():
        return gpu_computes_bfloat16()
    return not torch.accelerator.is_available() and _bf16_is_faster_on_cpu()


@cache
def _bf16_is_faster_on_cpu() -> bool:
    def seconds(dtype: torch.dtype) -> float:
        x = torch.ones(1024, 512, dtype=dtype)
        matrix = torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(10):
            started = time.perf_counter()
            x @ matrix
            times.append(time.perf_counter() - started)
        return min(times)

    return seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)


def config_overrides(settings: TrainSettings) -> dict[str, Any]:
    """Config fields given as KEY=VALUE, with values as in JSON and plain strings.

    Raises:
        ValueError: If one is no assignment, no field of the config, or set by another option, or
            if training starts from a saved model.
    """
    fields = VanillaTransformerConfig.__dataclass_fields__
    overrides, faults = {}, []
    if settings.config and settings.init_from:
        faults.append(
            f"--config does not apply to the saved model {settings.init_from!r}, whose sizes are "
            "fixed. Leave one of the two out."
        )
    for assignment in settings.config:
        name, equals, text = assignment.partition("=")
        if not equals:
            faults.append(f"--config takes KEY=VALUE, got {assignment!r}.")
        elif name in _SET_ELSEWHERE:
            faults.append(f"--config {name}: use {_SET_ELSEWHERE[name]} instead.")
        elif name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            faults.append(f"--config: VanillaTransformerConfig has no field {name!r}.{hint}")
        else:
            try:
                overrides[name] = json.loads(text)
            except json.JSONDecodeError:
                overrides[name] = text
    if settings.separate_vocabularies and overrides.get("share_encoder_decoder_embeddings"):
        faults.append(
            "--config share_encoder_decoder_embeddings must be false with "
            "--separate_vocabularies, which share no table, got true. Leave one of the two out."
        )
    if faults:
        raise ValueError("\n".join(faults))
    return overrides


def check_settings(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> None:
    """Refuses settings that no run can follow.

    Raises:
        ValueError: If there are any; the message names all.
    """
    config_overrides(settings)
    faults = [
        *_faults_of_ranges(settings, arguments),
        *_faults_of_trainer(arguments),
        *_faults_of_devices(settings, arguments),
        *_faults_of_data(settings),
        *_faults_of_vocabularies(settings),
        *_faults_of_schedules(settings, arguments),
        *_faults_of_fine_tuning(settings),
        *_faults_of_scores(settings, arguments),
        *faults_of_alignments(settings, arguments),
    ]
    if faults:
        raise ValueError("\n".join(faults))
    if settings.streaming:
        check_streaming(settings, arguments)


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


def _faults_of_trainer(arguments: Seq2SeqTrainingArguments) -> Iterator[str]:
    """Options of Trainer that would do nothing here, or what nobody wants."""
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
            "Give steps or epoch; the best checkpoint is kept beside the last ones."
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
    missing = set(arguments.report_to) - set(get_available_reporting_integrations())
    for name in sorted(missing):
        yield f"--report_to {name} needs the package {name}. Install it: pip install {name}"


def _faults_of_devices(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Processes and compilers that do not go together."""
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
            "installed. Install it, or choose varlen, which needs none."
        )
    if arguments.torch_compile and settings.attn_implementation == VARLEN:
        yield (
            "--torch_compile keeps the padding, which --attn_implementation varlen removes, got "
            "both. Give --compile_layers instead of --torch_compile, or leave varlen out."
        )


def _faults_of_data(settings: TrainSettings) -> Iterator[str]:
    """A saved dataset of one split, which has no validation pairs beside those for training."""
    for path in sorted({*settings.train} & {*settings.validation}):
        if Path(path, DATASET_STATE_JSON_FILENAME).is_file():
            yield (
                f"--validation must hold other pairs than --train, got {path!r} for both, which "
                "has one split. Split it first: Dataset.train_test_split."
            )


def _faults_of_vocabularies(settings: TrainSettings) -> Iterator[str]:
    """Vocabularies and languages that contradict each other."""
    if settings.target_vocab_size is not None and not settings.separate_vocabularies:
        yield (
            "--target_vocab_size needs --separate_vocabularies, got "
            f"{settings.target_vocab_size} alone. Add that, or set --vocab_size."
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
            "--target_language is that of all pairs, and --tag_column that of each, got "
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
        yield "--validation_sets are further sets beside --validation, got none. Add it."
    prefix, metric = split_metric(metric_of(arguments))
    if settings.validation and (metric not in ("loss", *METRICS) or prefix[:-1] not in ("", *sets)):
        yield (
            f"--metric_for_best_model must be loss or one of {', '.join(METRICS)}, or that of one "
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
    lengths = {name: getattr(arguments, name) for name in (*_BY_TIME, "max_steps")}
    lengths |= {"max_minutes": settings.max_minutes, "streaming": settings.streaming}
    free: dict[str, Any] = _BY_TIME | {"max_steps": -1, "max_minutes": None, "streaming": False}
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


def check_vocabularies(settings: TrainSettings, start: str, tokenizers: TokenizerPair) -> None:
    """Refuses what the tokenizers of a saved model cannot do.

    Args:
        settings: Of the run.
        start: Folder or Hub name of the model.
        tokenizers: Of the model.

    Raises:
        ValueError: If the run needs two vocabularies and the model has one, pairs of several
            directions have no tags, or targets cannot be encoded.
    """
    source = tokenizers.source
    if settings.tag_column and language_codes(source):
        raise ValueError(
            f"--tag_column needs a model with tags of languages before its sources, got "
            f"{type(source).__name__} in {start!r}, which names the languages of both sides. Train "
            "one direction at a time, with --source_language and --target_language."
        )
    if getattr(source, "src_vocab_size", None) != getattr(source, "tgt_vocab_size", None):
        raise ValueError(
            f"{type(source).__name__} of {start!r} has two vocabularies and encodes text with the "
            "first only, so there are no labels to train on. Translate with the model, or train "
            "one from the beginning."
        )
    if settings.separate_vocabularies and tokenizers.is_joint:
        raise ValueError(
            "--separate_vocabularies needs a model that was trained with it, got one vocabulary "
            f"of {len(tokenizers.source):,} entries for both sides in {start!r}. Leave it out, or "
            "train a model from the beginning."
        )


def prefer_better_scores(arguments: TrainingArguments) -> None:
    """Makes Trainer prefer lower error rates; by default it prefers lower values of losses only."""
    if kind := METRICS.get(split_metric(metric_of(arguments))[1]):
        arguments.greater_is_better = not kind.is_error_rate


def find_checkpoint(settings: TrainSettings, arguments: TrainingArguments) -> str | None:
    """The checkpoint to resume from; None without --resume, which needs a free folder.

    Raises:
        ValueError: If a run would overwrite another, or has no whole checkpoint to resume from.
    """
    folder = Path(arguments.output_dir)
    if not settings.resume:
        check_free(folder)
        return None
    checkpoint, skipped = resumable_checkpoint(folder)
    faults = [f"{path.name} is skipped: {fault}" for path, fault in skipped.items()]
    if checkpoint is None:
        raise ValueError(
            "\n".join(
                [
                    f"--resume needs a whole checkpoint in --output_dir, got none in {folder}. "
                    "Leave --resume out and choose another folder to start from the beginning.",
                    *faults,
                ]
            )
        )
    for fault in faults:
        PartialState().print(fault)
    return str(checkpoint)
