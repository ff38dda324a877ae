"""Which options are possible together: tables of rules, and the message of each."""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Seq2SeqTrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations

from vanilla_transformer_tools.evaluation.metrics import build_metrics
from vanilla_transformer_tools.settings import CASINGS, TrainSettings
from vanilla_transformer_tools.training.optimizer import ADAM
from vanilla_transformer_tools.training.options import BY_TIME, new_config
from vanilla_transformer_tools.training.ranking import metric_of


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

    def given(self, name: str) -> Any:
        """The value of an option; None if it is the default."""
        is_ours = hasattr(self.settings, name)
        default = getattr(TrainSettings() if is_ours else Seq2SeqTrainingArguments, name, None)
        if self.settings.minutes is not None:
            default = BY_TIME.get(name, default)
        value = getattr(self, name, None)
        return None if value == getattr(default, "value", default) else value


# Least value of numbers, and what they must be below.
_RANGES: dict[tuple[float, float], tuple[str, ...]] = {
    (2, math.inf): ("max_length", "generation_max_length"),
    (1, math.inf): (
        "max_validation_pairs",
        "shuffle_buffer",
        "tokenizer_pairs",
        "vocab_size",
        "target_vocab_size",
        "filter_max_characters",
        "filter_max_ratio",
        *CASINGS,
        "max_tokens_per_batch",
        "early_stopping_patience",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "generation_num_beams",
    ),
    (0.001, math.inf): ("minutes",),
    (0, math.inf): (
        "max_minutes",
        "num_train_epochs",
        "average_last",
        "save_total_limit",
        "r_drop",
        "learning_rate",
        "warmup_steps",
        "eval_steps",
        "save_steps",
        "logging_steps",
        "weight_decay",
        "max_grad_norm",
        "adam_epsilon",
        "dataloader_num_workers",
    ),
    (0, 2**32): ("seed", "data_seed"),
    (0, 1): (
        "bpe_dropout",
        "moving_average",
        "adam_beta1",
        "adam_beta2",
        "label_smoothing_factor",
    ),
}
# Options of Trainer that nothing here follows, and what to do instead.
_OF_NO_USE = {
    "push_to_hub": "`vanilla-transformer push` shares the finished model",
    "resume_from_checkpoint": "--resume continues the run in --output_dir",
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "auto_find_batch_size",
            "train_sampling_strategy",
            "dataloader_drop_last",
            "remove_unused_columns",
        ),
        "batches hold --max_tokens_per_batch tokens of pairs of similar length",
    ),
    **dict.fromkeys(
        ("eval_do_concat_batches", "batch_eval_metrics"),
        "scores are of all validation pairs together",
    ),
}
# The Hub knows languages by two or three letters, which a region may follow, and two words.
_LANGUAGE_CODE = "[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*|code|multilingual"
# Options that have an effect only with another one.
_NEEDED = {
    "target_vocab_size": "separate_vocabularies",
    "streaming": "max_steps",
    "shuffle_buffer": "streaming",
    "tokenizer_pairs": "streaming",
    "moving_average": "validation",
    "early_stopping_patience": "validation",
    "freeze": "init_from",
}
# Options of which only one can be given, and why.
_EXCLUSIVE = [
    *(
        ("minutes", name, "the minutes decide when the run ends and how its learning rate falls")
        for name in ("max_steps", "num_train_epochs", "lr_scheduler_type", "max_minutes")
    ),
    ("minutes", "streaming", "it counts the pairs"),
    (
        "minutes",
        "init_from",
        "it chooses the size of a new model; fine-tune with --max_steps and --lr_scheduler_type "
        "linear, or with --max_minutes",
    ),
    ("config", "init_from", "the sizes of a saved model are fixed"),
    ("tokenizer", "init_from", "a saved model keeps its own tokenizers"),
    ("symbols", "init_from", "a saved vocabulary has its own symbols"),
    ("symbols", "tokenizer", "a saved vocabulary has its own symbols"),
    ("tag_column", "target_language", "a column names a language for each pair, not for all"),
    ("streaming", "bpe_dropout", "BPE-dropout needs all words of the corpus in advance"),
    ("streaming", "filter_duplicates", "the filter remembers all pairs, and a stream stores none"),
    *(
        (name, "dataloader_persistent_workers", "persistent workers would keep the first epoch")
        for name in ("bpe_dropout", *CASINGS)
    ),
    *((name, "bpe_dropout", "both draw each epoch again") for name in CASINGS),
    *((name, "lowercase_sources", "sources in lower case do not show it") for name in CASINGS),
    ("compile_layers", "torch_compile", "one compiles the layers, the other the whole model"),
]


# Variables of launchers; "true" asks for a part of the model in each process.
_DIVIDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")

# What no run can follow; `{o.name}` in the message is the value of an option.
_REFUSED: list[tuple[Callable[[Options], Any], str]] = [
    (
        lambda o: o.tokenizer_kind == "word" and (o.all_caps_every or o.title_case_every),
        "--all_caps_every and --title_case_every need a vocabulary that can write any word, got "
        "--tokenizer_kind word. Take bpe, unigram or char, or leave them out.",
    ),
    (
        lambda o: not (o.max_steps > 0 or o.num_train_epochs > 0),
        "--num_train_epochs or --max_steps must be above 0, got {o.num_train_epochs} and "
        "{o.max_steps}.",
    ),
    (
        lambda o: not o.save_steps > 0,
        "--save_steps must be above 0, got {o.save_steps}. For no checkpoints at all there is "
        "--save_strategy no.",
    ),
    (
        lambda o: (
            o.minutes is not None
            and 0 < min(o.warmup_steps or 1, o.eval_steps or 1, o.save_steps) < 1
        ),
        "--warmup_steps, --eval_steps and --save_steps must be numbers of updates with --minutes, "
        "whose length is unknown, got {o.warmup_steps}, {o.eval_steps} and {o.save_steps}.",
    ),
    (
        lambda o: o.save_strategy == "best",
        "--save_strategy best leaves nothing to resume from between two of the best scores. Give "
        "steps or epoch; the best checkpoint is kept along with the last ones.",
    ),
    (
        lambda o: (
            (o.average_last or 0) > 1
            and (o.save_strategy == "no" or 0 < (o.save_total_limit or 0) < o.average_last)
        ),
        "--average_last {o.average_last} needs as many checkpoints, got --save_total_limit "
        "{o.save_total_limit} and --save_strategy {o.save_strategy}. Keep more, or average fewer.",
    ),
    (
        lambda o: o.optimizer == "muon" and o.optim not in ADAM,
        f"--optimizer muon goes with Adam, --optim {' or '.join(ADAM)}, got {{o.optim}}. Leave one "
        "of the two out.",
    ),
    (
        lambda o: o.n_gpu > 1,
        "Each GPU needs a process of its own, got one process for {o.n_gpu}. Train by `accelerate "
        "launch --num_processes {o.n_gpu} scripts/train.py` with the same options, or on one GPU, "
        "with CUDA_VISIBLE_DEVICES=0.",
    ),
    (
        lambda o: o.fsdp or o.deepspeed or "true" in map(os.environ.get, _DIVIDED),
        "train keeps the whole model in each process, got FSDP or DeepSpeed. Launch it with "
        "examples/launch/ddp.yaml, or use Seq2SeqTrainer, as examples/finetune_with_trainer.py "
        "does.",
    ),
    (
        lambda o: set(o.report_to) - set(get_available_reporting_integrations()),
        "--report_to needs the packages of the services that it names, got {o.report_to}. Install "
        "them with pip.",
    ),
    (
        lambda o: not all(re.fullmatch(_LANGUAGE_CODE, each) for each in o.language),
        "--language must be codes of ISO 639, such as de en, got {o.language}.",
    ),
    (
        lambda o: o.filter_overlap == [] and not o.validation,
        "--filter_overlap needs evaluation pairs to compare with, got none. Give --validation, or "
        "files after it.",
    ),
    (
        lambda o: (o.source_language or o.target_language) and not (o.init_from or o.tokenizer),
        "--source_language and --target_language need the tokenizers of a saved model, got "
        "{o.source_language} and {o.target_language} for new ones. Give --init_from or "
        "--tokenizer; or --tag_column, for a model of several directions.",
    ),
    (
        lambda o: (
            o.validation
            and o.eval_strategy == "no"
            and (o.moving_average, o.early_stopping_patience) != (None, None)
        ),
        "--moving_average and --early_stopping_patience need scores, got --eval_strategy no. Leave "
        "one of the two out.",
    ),
    (
        lambda o: metric_of(o.arguments) not in ("loss", *o.metrics),
        "--metric_for_best_model must be loss or one of --metrics, got {o.metric_for_best_model} "
        "and {o.metrics}. Change either one.",
    ),
    (
        lambda o: (
            metric_of(o.arguments) in o.metrics
            and (o.prediction_loss_only or not o.predict_with_generate)
        ),
        "--metric_for_best_model {o.metric_for_best_model} is a score of generated text, got "
        "--predict_with_generate {o.predict_with_generate} and --prediction_loss_only "
        "{o.prediction_loss_only}. Take loss, or generate.",
    ),
]


def _faults(o: Options) -> Iterator[str]:
    """What is wrong with the options, in words."""
    for (least, limit), names in _RANGES.items():
        bound = f"below {limit:,}" if limit < math.inf else "finite"
        for name in names:
            # Every comparison with NaN is false, so NaN is refused.
            if (value := getattr(o, name)) is not None and not least <= value < limit:
                yield f"--{name} must be at least {least} and {bound}, got {value}."
    for name, reason in _OF_NO_USE.items():
        if (value := o.given(name)) is not None:
            yield f"--{name} must be left out: {reason}, got {value}."
    for name, needed in _NEEDED.items():
        if (value := o.given(name)) is not None and o.given(needed) is None:
            yield f"--{name} needs --{needed}, got {value} without it. Add it."
    for name, other, reason in _EXCLUSIVE:
        values = o.given(name), o.given(other)
        if None not in values:
            yield (
                f"--{name} excludes --{other}: {reason}, got {values[0]} and {values[1]}. Leave "
                "one of the two out."
            )
    for is_so, message in _REFUSED:
        if is_so(o):
            yield message.format(o=o)
    try:
        # The references, by which auto chooses, have not been read yet.
        build_metrics(o.metrics, "13a" if o.bleu_tokenize == "auto" else o.bleu_tokenize)
    except ValueError as error:
        yield f"--bleu_tokenize: {error}"
    yield from _config_faults(o.settings)
    try:
        unused = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(o.lr_scheduler_type, unused, 1, 10**9, o.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        yield (
            f"--lr_scheduler_kwargs must fit --lr_scheduler_type {o.lr_scheduler_type}, got "
            f"{o.lr_scheduler_kwargs}: {error}."
        )


def _config_faults(settings: TrainSettings) -> Iterator[str]:
    """What is wrong with --config: the first fault of each field, whose name it begins with."""
    try:
        # As for new tokenizers: --config cannot change what saved ones decide on.
        new_config(settings, None)
    except StrictDataclassError as error:
        # Of a value of the wrong type, what each allowed type says of it is left out.
        said = str(error.__cause__ or error).partition(" Errors: ")[0]
        faults = re.sub(r"<class '(\w+)'>", r"\1", said).split("\n")
        first = {fault.split()[0]: fault for fault in reversed(faults)}
        yield from (f"--config: {fault}" for fault in reversed(first.values()))
    except ValueError as error:
        yield str(error)


def check_settings(settings: TrainSettings, arguments: Seq2SeqTrainingArguments) -> None:
    """Rejects settings that no run can follow, before anything is read.

    Raises:
        ValueError: If there are any; the message names all.
    """
    if faults := list(_faults(Options(settings, arguments))):
        raise ValueError("\n".join(faults))
