"""The recipe: defaults of a run, section 5 of the paper, and which other values are possible."""

import math
import timeit
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets.config import DATASET_STATE_JSON_FILENAME
from transformers import Seq2SeqTrainingArguments, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import SaveStrategy
from transformers.utils import (
    is_flash_attn_2_available,
    is_peft_available,
    is_torch_tf32_available,
)

from vanilla_transformer_tools.evaluation.metrics import METRICS, build_metrics
from vanilla_transformer_tools.saved_folder import gpu_computes_bfloat16
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.training.averaging import metric_of, split_metric
from vanilla_transformer_tools.training.optimizer import ADAM
from vanilla_transformer_tools.training.starting_model import config_overrides

# Number of checkpoints that are averaged by default, as in the paper.
_AVERAGED = 5

# For a saved model: within the 2e-5 to 2e-4 at which large pretrained ones are usually fine-tuned.
# An adapter, which begins at zero, needs about ten times as much.
_FINE_TUNING = {"learning_rate": 1e-4, "warmup_steps": 100}
_ADAPTER_RATE = 1e-3

# With --minutes, `StopOnRequest` makes the rate fall and ends the run.
BY_TIME: dict[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup",
    "num_train_epochs": 1_000_000,
}


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
    "minutes": (0.001, math.inf),
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
    "push_to_hub": "it uploads whatever lies in the folder, after each checkpoint; "
    "`vanilla-transformer push` shares the finished model",
    "resume_from_checkpoint": "--resume continues the run in --output_dir from its last "
    "checkpoint, and --init_from begins a new one",
    "per_device_train_batch_size": "batches have unequal numbers of pairs, and "
    "--max_tokens_per_batch is their size",
    "train_sampling_strategy": "batches are always of pairs of similar length, in random order",
    "auto_find_batch_size": "batches fit the memory unless --max_tokens_per_batch is given",
    "dataloader_drop_last": "each pair is trained on once in an epoch",
    "remove_unused_columns": "the text of the pairs is no input of the model",
    "eval_do_concat_batches": "scores are of all validation pairs together",
    "batch_eval_metrics": "scores are of all validation pairs together",
}

# Options that have an effect only with another one.
_NEEDED = {
    "target_vocab_size": "separate_vocabularies",
    "streaming": "max_steps",
    "validation_sets": "validation",
    "moving_average": "validation",
    "early_stopping_patience": "validation",
    "freeze": "init_from",
    "peft": "init_from",
    "lora_rank": "peft",
    "lora_alpha": "peft",
    "lora_dropout": "peft",
    "lora_target_modules": "peft",
}

_BY_MINUTES = "the minutes decide when the run ends and how its learning rate falls"
_SAVED = "a saved model keeps its own tokenizers"

# Pairs of options of which only one can be given, and why.
_EXCLUSIVE = {
    ("minutes", "max_steps"): _BY_MINUTES,
    ("minutes", "num_train_epochs"): _BY_MINUTES,
    ("minutes", "lr_scheduler_type"): _BY_MINUTES,
    ("minutes", "max_minutes"): _BY_MINUTES,
    ("minutes", "streaming"): _BY_MINUTES,
    ("minutes", "init_from"): "it chooses the size of a new model; fine-tune with --max_steps and "
    "--lr_scheduler_type linear, or with --max_minutes",
    ("config", "init_from"): "the sizes of a saved model are fixed",
    ("tokenizer", "init_from"): _SAVED,
    ("symbols", "init_from"): _SAVED,
    ("symbols", "tokenizer"): "a saved vocabulary has its own symbols",
    ("tag_column", "target_language"): "a column names a language for each pair, not for all",
    ("peft", "freeze"): "everything but the adapters is frozen; choose their layers by "
    "--lora_target_modules",
    ("streaming", "bpe_dropout"): "BPE-dropout needs all words of the corpus in advance",
    ("streaming", "filter_duplicates"): "the filter remembers all pairs, and a stream stores none",
    ("bpe_dropout", "dataloader_persistent_workers"): "each epoch is drawn again, and persistent "
    "workers would keep the first one",
    ("compile_layers", "torch_compile"): "one compiles the layers, the other the whole model",
}

# Schedules that are no function of the update.
_BY_LOSS = {"reduce_lr_on_plateau", "greedy"}


def recipe(settings: TrainSettings) -> dict[str, Any]:
    """Defaults of a run for `Seq2SeqTrainingArguments`: section 5 of the paper.

    With Transformers' default timescale, `inverse_sqrt` is equation (3), scaled so that
    `learning_rate` is its peak.
    """
    arguments: dict[str, Any] = {
        "output_dir": "runs/model",
        "num_train_epochs": 30,
        **schedule(settings),
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
        # Those to average, and the best one, which Trainer counts too. Trainer takes 0 for all.
        "save_total_limit": max(1, last_checkpoints(settings) + bool(settings.validation)),
        "report_to": "none",
        **_of_the_machine(settings.streaming),
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
        arguments |= BY_TIME
    if settings.streaming or settings.minutes is not None:
        # A stream has no epochs; those of a run of minutes may be longer than the run.
        arguments |= {"save_strategy": "steps", "save_steps": 1000}
        if settings.validation:
            arguments |= {"eval_strategy": "steps", "eval_steps": 1000}
    return arguments


def last_checkpoints(settings: TrainSettings) -> int:
    """Number of last checkpoints that are kept, to be averaged if scores can compare the mean."""
    return _AVERAGED if settings.average_last is None else settings.average_last


def in_step(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that agree with the user's arguments.

    Each evaluation is of a checkpoint, so strategy and interval of one also hold for the other,
    and an interval implies the strategy `steps`. Without either there is no best checkpoint.

    Args:
        defaults: Defaults by the names of Trainer's arguments.
        given: Arguments that the user gave.
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


def schedule(settings: TrainSettings) -> dict[str, float]:
    """Default peak of the learning rate and updates until it."""
    if not settings.init_from:
        preset = PRESETS[settings.preset]
        return {"learning_rate": preset.learning_rate, "warmup_steps": preset.warmup_steps}
    return _FINE_TUNING | ({"learning_rate": _ADAPTER_RATE} if settings.peft else {})


def _of_the_machine(streaming: bool) -> dict[str, Any]:
    """Defaults that depend on the device."""
    on_gpu = torch.cuda.is_available()
    on_cpu = not (on_gpu or torch.accelerator.is_available())
    return {
        "dataloader_pin_memory": on_gpu,
        # They pad batches while a GPU works; on a CPU they would take cores from training. Each
        # worker of a stream reads all of it.
        "dataloader_num_workers": on_gpu * (1 if streaming else 2),
        # The products that bf16 leaves in float32. None: as torch is set to.
        "tf32": True if is_torch_tf32_available() else None,
        # Transformers accepts bf16 on a CPU only with `use_cpu`.
        "use_cpu": on_cpu,
        # Some devices emulate it.
        "bf16": gpu_computes_bfloat16() or (on_cpu and _bf16_is_faster_on_cpu()),
    }


def dtype_of_products(arguments: TrainingArguments) -> torch.dtype:
    """Type in which a run computes its matrix products."""
    if arguments.bf16:
        return torch.bfloat16
    return torch.float16 if arguments.fp16 else torch.float32


@cache
def _bf16_is_faster_on_cpu() -> bool:
    def seconds(dtype: torch.dtype, repeat: int = 10) -> float:
        x, matrix = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        return min(timeit.repeat(lambda: x @ matrix, number=1, repeat=repeat))

    limit = 0.8 * seconds(torch.float32)
    # Emulated, it takes many times as long, which the second product shows; the first one prepares.
    return seconds(torch.bfloat16, 2) < 9 * limit and seconds(torch.bfloat16) < limit


def check_settings(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> None:
    """Rejects settings that no run can follow, before anything is read.

    Raises:
        ValueError: If there are any; the message names all.
    """
    faults = [
        *_faults_of_ranges(settings, arguments),
        *_faults_of_options(settings, arguments),
        *_faults_of_trainer(settings, arguments),
        *_faults_of_data(settings),
        *_faults_of_schedules(settings, arguments),
        *_faults_of_scores(settings, arguments),
    ]
    for interpret in (lambda: config_overrides(settings), lambda: settings.paths_of_validation):
        try:
            interpret()
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _faults_of_ranges(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Numbers that are too small or too large."""
    for options in (settings, arguments):
        for name, (least, limit) in _RANGES.items():
            value = getattr(options, name, None)
            # Every comparison with NaN is false, so NaN is refused.
            if value is not None and not least <= value < limit:
                bound = f"below {limit:g}" if limit < math.inf else "finite"
                yield f"--{name} must be at least {least} and {bound}, got {value}."
    if not (arguments.max_steps > 0 or arguments.num_train_epochs > 0):
        yield (
            "--num_train_epochs or --max_steps must be above 0, got "
            f"{arguments.num_train_epochs} and {arguments.max_steps}."
        )
    if not arguments.save_steps > 0:
        yield (
            f"--save_steps must be above 0, got {arguments.save_steps}. For no checkpoints at all "
            "there is --save_strategy no."
        )
    for name in ("warmup_steps", "eval_steps", "save_steps"):
        if settings.minutes is not None and 0 < (getattr(arguments, name) or 0) < 1:
            yield (
                f"--{name} must be a number of updates with --minutes, whose length is unknown, "
                f"got the share {getattr(arguments, name):g}."
            )


def _faults_of_options(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Options that do nothing, lack another one, or exclude each other."""
    given = partial(_given, settings, arguments)
    for name, reason in _OF_NO_USE.items():
        if (value := given(name)) is not None:
            yield f"--{name} must be left out: {reason}, got {value}."
    for name, needed in _NEEDED.items():
        if (value := given(name)) is not None and given(needed) is None:
            yield f"--{name} needs --{needed}, got {value} without it. Add it."
    for (name, other), reason in _EXCLUSIVE.items():
        values = given(name), given(other)
        if None not in values:
            yield (
                f"--{name} excludes --{other}: {reason}, got {values[0]} and {values[1]}. Leave "
                "one of the two out."
            )


def _given(settings: TrainSettings, arguments: Seq2SeqTrainingArguments, name: str) -> Any:
    """The value of an option, ours or Trainer's; None if it is the default."""
    is_ours = hasattr(settings, name)
    value = getattr(settings if is_ours else arguments, name, None)
    default = getattr(type(settings)() if is_ours else Seq2SeqTrainingArguments, name, None)
    if settings.minutes is not None:
        default = BY_TIME.get(name, default)
    # The name of a schedule is an enum.
    return None if value == default else getattr(value, "value", value)


def _faults_of_trainer(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Values of Trainer that nothing here follows, and what the machine lacks."""
    if arguments.save_strategy == SaveStrategy.BEST:
        yield (
            "--save_strategy best leaves nothing to resume from between two of the best scores. "
            "Give steps or epoch; the best checkpoint is kept along with the last ones."
        )
    if settings.optimizer == "muon" and arguments.optim not in ADAM:
        yield (
            f"--optimizer muon goes with Adam, --optim {' or '.join(ADAM)}, got "
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
    if settings.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
        yield (
            "--attn_implementation flash_attention_2 needs the package flash-attn, which is not "
            "installed. Install it, or leave the option out."
        )
    if settings.peft and not is_peft_available():
        yield "--peft needs the package peft. Install it: pip install -e '.[peft]'"


def _faults_of_data(settings: TrainSettings) -> Iterator[str]:
    """Pairs that cannot be read as asked for, and filters without anything to compare with."""
    for path in sorted({*settings.train} & {*settings.validation}):
        # A saved dataset of one split has no validation pairs beside those for training.
        if Path(path, DATASET_STATE_JSON_FILENAME).is_file():
            yield (
                f"--validation must hold other pairs than --train, got {path!r} for both, which "
                "has one split. Split it first: Dataset.train_test_split."
            )
    if settings.filter_overlap == [] and not settings.validation:
        yield (
            "--filter_overlap needs evaluation pairs to compare with, got none. Give --validation, "
            "or files after it."
        )
    if not (settings.init_from or settings.tokenizer):
        for name in ("source_language", "target_language"):
            if (value := getattr(settings, name)) is not None:
                yield (
                    f"--{name} needs the tokenizers of a saved model, got {value!r} for new ones. "
                    "Give --init_from or --tokenizer; or --tag_column, for a model of several "
                    "directions."
                )


def _faults_of_schedules(
    settings: TrainSettings, arguments: Seq2SeqTrainingArguments
) -> Iterator[str]:
    """Schedules that contradict each other."""
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
    is_unscored = settings.validation and arguments.eval_strategy == "no"
    for name in ("moving_average", "early_stopping_patience"):
        if getattr(settings, name) is not None and is_unscored:
            yield f"--{name} needs scores, got --eval_strategy no. Leave one of the two out."
    try:
        # The references, by which auto chooses, have not been read yet.
        is_open = settings.bleu_tokenize == "auto"
        build_metrics(settings.metrics, "13a" if is_open else settings.bleu_tokenize)
    except ValueError as error:
        yield f"--bleu_tokenize: {error}"
    sets = [named.partition("=")[0] for named in settings.validation_sets]
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
