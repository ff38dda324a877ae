"""Which options are possible together: one list of rules, each with its message."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets.config import DATASET_STATE_JSON_FILENAME
from transformers import Seq2SeqTrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import is_flash_attn_2_available

from vanilla_transformer_tools.evaluation.metrics import METRICS, build_metrics
from vanilla_transformer_tools.settings import CASINGS, TrainSettings
from vanilla_transformer_tools.training.optimizer import ADAM
from vanilla_transformer_tools.training.options import BY_TIME
from vanilla_transformer_tools.training.ranking import metric_of
from vanilla_transformer_tools.training.start import config_overrides


@dataclass(frozen=True)
class Options:
    """Our settings and Trainer's arguments as one: the attributes are the options of both."""

    settings: TrainSettings
    arguments: Seq2SeqTrainingArguments

    def __getattr__(self, name: str) -> Any:
        owner = self.settings if hasattr(self.settings, name) else self.arguments
        value = getattr(owner, name)
        # The name of a schedule, a strategy or an optimizer is an enum.
        return getattr(value, "value", value)

    @property
    def metric(self) -> str:
        """Name of the score that chooses checkpoints."""
        return metric_of(self.arguments)

    @property
    def scores(self) -> str:
        """Names of all scores, in words."""
        return " ".join(self.settings.metrics)

    def given(self, name: str) -> Any:
        """The value of an option; None if it is the default."""
        is_ours = hasattr(self.settings, name)
        default = getattr(TrainSettings() if is_ours else Seq2SeqTrainingArguments, name, None)
        if self.settings.minutes is not None:
            default = BY_TIME.get(name, default)
        value = getattr(self, name, None)
        return None if value == getattr(default, "value", default) else value


# What is wrong with the options, in words; a false value: nothing.
Rule = Callable[[Options], str | bool | None]


def _in_range(name: str, least: float, limit: float) -> Rule:
    """A number from `least` to below `limit`."""

    def fault(options: Options) -> str | bool:
        value = getattr(options, name)
        bound = f"below {limit:g}" if limit < math.inf else "finite"
        # Every comparison with NaN is false, so NaN is refused.
        return (
            value is not None
            and not least <= value < limit
            and f"--{name} must be at least {least} and {bound}, got {value}."
        )

    return fault


def _of_no_use(name: str, reason: str) -> Rule:
    """An option of Trainer that nothing here would follow."""
    return lambda options: (
        options.given(name) is not None
        and f"--{name} must be left out: {reason}, got {options.given(name)}."
    )


def _needs(name: str, needed: str) -> Rule:
    """An option that has an effect only with another one."""
    return lambda options: (
        options.given(name) is not None
        and options.given(needed) is None
        and f"--{name} needs --{needed}, got {options.given(name)} without it. Add it."
    )


def _excludes(name: str, other: str, reason: str) -> Rule:
    """Two options of which only one can be given."""
    return lambda options: (
        None not in (options.given(name), options.given(other))
        and f"--{name} excludes --{other}: {reason}, got {options.given(name)} and "
        f"{options.given(other)}. Leave one of the two out."
    )


def _refused(is_so: Callable[[Options], Any], message: str) -> Rule:
    """Options that no run can follow; `{o.name}` in the message is the value of one."""
    return lambda options: is_so(options) and message.format(o=options)


def _trial(interpret: Callable[[Options], Any], message: str = "{error}") -> Rule:
    """Options that a function must accept."""

    def fault(options: Options) -> str | None:
        try:
            interpret(options)
        except (TypeError, ValueError) as error:
            return message.format(o=options, error=error)
        return None

    return fault


def _build_schedule(o: Options) -> None:
    get_scheduler(
        o.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)]),
        num_warmup_steps=1,
        num_training_steps=10**9,
        scheduler_specific_kwargs=o.lr_scheduler_kwargs,
    )


def _missing_reports(o: Options) -> list[str]:
    return sorted(set(o.report_to) - set(get_available_reporting_integrations()))


def _of_one_split(o: Options) -> list[str]:
    """Saved datasets that have no validation pairs beside those for training."""
    both = sorted({*o.train} & {*o.validation})
    return [path for path in both if Path(path, DATASET_STATE_JSON_FILENAME).is_file()]


def _divides_the_model(o: Options) -> bool:
    """Whether options, or variables that launchers set, ask for a part of the model a process."""
    launched = (os.environ.get(f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    return bool(o.fsdp or o.deepspeed or "true" in launched)


def _is_share(o: Options, name: str) -> bool:
    return o.minutes is not None and 0 < (getattr(o, name) or 0) < 1


def _lacks_tokenizers(o: Options, name: str) -> bool:
    return not (o.init_from or o.tokenizer) and getattr(o, name) is not None


def _cannot_write(o: Options, name: str) -> bool:
    return o.tokenizer_kind == "word" and getattr(o, name) is not None


def _is_unscored(o: Options, name: str) -> bool:
    return getattr(o, name) is not None and o.validation and o.eval_strategy == "no"


_BY_MINUTES = "the minutes decide when the run ends and how its learning rate falls"
_SAVED = "a saved model keeps its own tokenizers"
_OF_ALL = "scores are of all validation pairs together"

RULES: list[Rule] = [
    *(
        _in_range(name, 1, math.inf)
        for name in (
            *("max_validation_pairs", "shuffle_buffer", "tokenizer_pairs", "filter_max_characters"),
            *CASINGS,
            *("filter_max_ratio", "max_tokens_per_batch", "early_stopping_patience"),
            *("gradient_accumulation_steps", "per_device_eval_batch_size"),
        )
    ),
    *(
        _in_range(name, 0, math.inf)
        for name in (
            *("max_minutes", "average_last", "r_drop", "learning_rate"),
            *("warmup_steps", "weight_decay", "max_grad_norm", "adam_epsilon"),
        )
    ),
    *(
        _in_range(name, 0, 1)
        for name in (
            *("bpe_dropout", "moving_average", "adam_beta1", "adam_beta2"),
            "label_smoothing_factor",
        )
    ),
    _in_range("max_length", 2, math.inf),
    _in_range("minutes", 0.001, math.inf),
    _of_no_use(
        "push_to_hub",
        "it uploads whatever lies in the folder, after each checkpoint; `vanilla-transformer push` "
        "shares the finished model",
    ),
    _of_no_use(
        "resume_from_checkpoint",
        "--resume continues the run in --output_dir from its last checkpoint, and --init_from "
        "begins a new one",
    ),
    _of_no_use(
        "per_device_train_batch_size",
        "batches have unequal numbers of pairs, and --max_tokens_per_batch is their size",
    ),
    _of_no_use(
        "train_sampling_strategy",
        "batches are always of pairs of similar length, in random order",
    ),
    _of_no_use(
        "auto_find_batch_size", "batches fit the memory unless --max_tokens_per_batch is given"
    ),
    _of_no_use("dataloader_drop_last", "each pair is trained on once in an epoch"),
    _of_no_use("remove_unused_columns", "the text of the pairs is no input of the model"),
    _of_no_use("eval_do_concat_batches", _OF_ALL),
    _of_no_use("batch_eval_metrics", _OF_ALL),
    _needs("target_vocab_size", "separate_vocabularies"),
    _needs("streaming", "max_steps"),
    _needs("moving_average", "validation"),
    _needs("early_stopping_patience", "validation"),
    _needs("freeze", "init_from"),
    *(
        _excludes("minutes", name, _BY_MINUTES)
        for name in (
            *("max_steps", "num_train_epochs", "lr_scheduler_type", "max_minutes", "streaming"),
        )
    ),
    _excludes(
        "minutes",
        "init_from",
        "it chooses the size of a new model; fine-tune with --max_steps and --lr_scheduler_type "
        "linear, or with --max_minutes",
    ),
    _excludes("config", "init_from", "the sizes of a saved model are fixed"),
    _excludes("tokenizer", "init_from", _SAVED),
    _excludes("symbols", "init_from", _SAVED),
    _excludes("symbols", "tokenizer", "a saved vocabulary has its own symbols"),
    _excludes(
        "tag_column", "target_language", "a column names a language for each pair, not for all"
    ),
    _excludes("streaming", "bpe_dropout", "BPE-dropout needs all words of the corpus in advance"),
    _excludes(
        "streaming",
        "filter_duplicates",
        "the filter remembers all pairs, and a stream stores none",
    ),
    *(
        _excludes(
            name,
            "dataloader_persistent_workers",
            "each epoch is drawn again, and persistent workers would keep the first one",
        )
        for name in ("bpe_dropout", *CASINGS)
    ),
    *(
        rule
        for name in CASINGS
        for rule in (
            _excludes(name, "bpe_dropout", "both draw each epoch again"),
            _excludes(name, "lowercase_sources", "sources in lower case do not show it"),
            _refused(
                partial(_cannot_write, name=name),
                f"--{name} needs a vocabulary that can write any word, got --tokenizer_kind word. "
                "Take bpe, unigram or char, or leave it out.",
            ),
        )
    ),
    _excludes(
        "compile_layers", "torch_compile", "one compiles the layers, the other the whole model"
    ),
    _refused(
        lambda o: not (o.max_steps > 0 or o.num_train_epochs > 0),
        "--num_train_epochs or --max_steps must be above 0, got {o.num_train_epochs} and "
        "{o.max_steps}.",
    ),
    _refused(
        lambda o: not o.save_steps > 0,
        "--save_steps must be above 0, got {o.save_steps}. For no checkpoints at all there is "
        "--save_strategy no.",
    ),
    *(
        _refused(
            partial(_is_share, name=name),
            f"--{name} must be a number of updates with --minutes, whose length is unknown, got "
            f"the share {{o.{name}:g}}.",
        )
        for name in ("warmup_steps", "eval_steps", "save_steps")
    ),
    _refused(
        lambda o: o.save_strategy == "best",
        "--save_strategy best leaves nothing to resume from between two of the best scores. Give "
        "steps or epoch; the best checkpoint is kept along with the last ones.",
    ),
    _refused(
        lambda o: o.optimizer == "muon" and o.optim not in ADAM,
        f"--optimizer muon goes with Adam, --optim {' or '.join(ADAM)}, got {{o.optim}}. Leave one "
        "of the two out.",
    ),
    lambda o: "\n".join(
        f"--report_to {name} needs the package {name}. Install it: pip install {name}"
        for name in _missing_reports(o)
    ),
    _refused(
        lambda o: o.n_gpu > 1,
        "Each GPU needs a process of its own, got one process for {o.n_gpu}. Train by `accelerate "
        "launch --num_processes {o.n_gpu} scripts/train.py` with the same options, or on one GPU, "
        "with CUDA_VISIBLE_DEVICES=0.",
    ),
    _refused(
        _divides_the_model,
        "train keeps the whole model in each process, got FSDP or DeepSpeed. Launch it with "
        "examples/launch/ddp.yaml, or use Seq2SeqTrainer, as examples/finetune_with_trainer.py "
        "does.",
    ),
    _refused(
        lambda o: o.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available(),
        "--attn_implementation flash_attention_2 needs the package flash-attn, which is not "
        "installed. Install it, or leave the option out.",
    ),
    lambda o: "\n".join(
        f"--validation must hold other pairs than --train, got {path!r} for both, which has one "
        "split. Split it first: Dataset.train_test_split."
        for path in _of_one_split(o)
    ),
    _refused(
        lambda o: o.filter_overlap == [] and not o.validation,
        "--filter_overlap needs evaluation pairs to compare with, got none. Give --validation, or "
        "files after it.",
    ),
    *(
        _refused(
            partial(_lacks_tokenizers, name=name),
            f"--{name} needs the tokenizers of a saved model, got {{o.{name}!r}} for new ones. "
            "Give --init_from or --tokenizer; or --tag_column, for a model of several directions.",
        )
        for name in ("source_language", "target_language")
    ),
    _trial(
        _build_schedule,
        "--lr_scheduler_kwargs must fit --lr_scheduler_type {o.lr_scheduler_type}, got "
        "{o.lr_scheduler_kwargs}: {error}.",
    ),
    *(
        _refused(
            partial(_is_unscored, name=name),
            f"--{name} needs scores, got --eval_strategy no. Leave one of the two out.",
        )
        for name in ("moving_average", "early_stopping_patience")
    ),
    # The references, by which auto chooses, have not been read yet.
    _trial(
        lambda o: build_metrics(o.metrics, "13a" if o.bleu_tokenize == "auto" else o.bleu_tokenize),
        "--bleu_tokenize: {error}",
    ),
    _refused(
        lambda o: o.validation and o.metric not in ("loss", *METRICS),
        f"--metric_for_best_model must be loss or one of {', '.join(METRICS)}, got {{o.metric}}.",
    ),
    _refused(
        lambda o: o.metric in METRICS and o.prediction_loss_only,
        "--prediction_loss_only computes no {o.metric}. Add --metric_for_best_model loss.",
    ),
    _refused(
        lambda o: o.metric in METRICS and o.metric not in o.metrics,
        "--metric_for_best_model must be one of --metrics, got {o.metric} and "
        "{o.scores}. Add it to --metrics.",
    ),
    _refused(
        lambda o: o.metric in METRICS and not o.predict_with_generate,
        "--metric_for_best_model must be loss with --predict_with_generate false, got "
        "{o.metric}, which scores generated text. Change either one.",
    ),
    _trial(lambda o: config_overrides(o.settings)),
]


def check_settings(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> None:
    """Rejects settings that no run can follow, before anything is read.

    Raises:
        ValueError: If there are any; the message names all.
    """
    options = Options(settings, arguments)
    faults = [fault for rule in RULES if (fault := rule(options))]
    if faults:
        raise ValueError("\n".join(map(str, faults)))
