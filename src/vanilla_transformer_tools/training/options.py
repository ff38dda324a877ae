"""Defaults of a run, from section 5 of the paper, and what its options say together."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import is_torch_tf32_available

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.saved_folder import gpu_computes_bfloat16
from vanilla_transformer_tools.settings import PRESETS, TrainSettings

# Number of checkpoints that are averaged by default, as in the paper.
_AVERAGED = 5

# For a saved model: within the 2e-5 to 2e-4 at which large pretrained ones are usually fine-tuned.
_FINE_TUNING = {"learning_rate": 1e-4, "warmup_steps": 100}

# For the matrices of Muon, times the rate.
_DECAY_OF_MUON = 0.5

# Config fields that the command line sets by other options.
_SET_ELSEWHERE = {
    "vocab_size": "--vocab_size",
    "decoder_vocab_size": "--separate_vocabularies with --target_vocab_size",
    "label_smoothing": "--label_smoothing_factor",
    "dtype": "--bf16 or --fp16",
}

# Fields of a config that belong to the tokenizers.
_VOCABULARY_FIELDS = (
    "vocab_size",
    "decoder_vocab_size",
    "share_encoder_decoder_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)

# With --minutes, `Schedule` makes the rate fall and ends the run.
BY_TIME: dict[str, Any] = {
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
        **default_schedule(settings),
        "lr_scheduler_type": "inverse_sqrt",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        # A saved model is not pulled to zero.
        "weight_decay": _DECAY_OF_MUON * (settings.optimizer == "muon" and not settings.init_from),
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


def consistent_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
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


def default_schedule(settings: TrainSettings) -> dict[str, float]:
    """Default peak of the learning rate and updates until it."""
    if settings.init_from:
        return _FINE_TUNING
    preset = PRESETS[settings.preset]
    return {"learning_rate": preset.learning_rate, "warmup_steps": preset.warmup_steps}


def _of_the_machine(streaming: bool) -> dict[str, Any]:
    """Defaults that depend on the device."""
    on_gpu = torch.cuda.is_available()
    return {
        "dataloader_pin_memory": on_gpu,
        # They pad batches while a GPU works; on a CPU they would take cores from training. Each
        # worker of a stream reads all of it.
        "dataloader_num_workers": on_gpu * (1 if streaming else 2),
        # The products that bf16 leaves in float32. None: as torch is set to.
        "tf32": True if is_torch_tf32_available() else None,
        # Transformers accepts bf16 on a CPU only with `use_cpu`; the plan chooses it.
        "use_cpu": not (on_gpu or torch.accelerator.is_available()),
        # Some devices emulate it.
        "bf16": gpu_computes_bfloat16(),
    }


def config_overrides(settings: TrainSettings) -> dict[str, Any]:
    """Config fields given as KEY=VALUE, with values as in JSON and plain strings.

    Raises:
        ValueError: If one is no assignment, no field of the config, or set by another option.
    """
    fields = VanillaTransformerConfig.__dataclass_fields__
    overrides, faults = {}, []
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


def model_fields(settings: TrainSettings) -> dict[str, Any]:
    """Config fields of a new model: its preset, and what --config changes in it."""
    return PRESETS[settings.preset].config() | config_overrides(settings)


def new_config(
    settings: TrainSettings, saved: VanillaTransformerConfig | None
) -> VanillaTransformerConfig:
    """The config of a new model, whose vocabularies are as large as they may become.

    The config of the model of --tokenizer, if it was saved with one, decides on them.

    Raises:
        ValueError: If --config contradicts the vocabulary of --tokenizer.
    """
    fields = model_fields(settings)
    if settings.tokenizer and (set_twice := sorted(fields.keys() & set(_VOCABULARY_FIELDS))):
        raise ValueError(
            f"--config must leave out {' and '.join(set_twice)} with --tokenizer, whose model "
            "decides on them. Leave either out."
        )
    if saved:
        fields |= {name: getattr(saved, name) for name in _VOCABULARY_FIELDS}
    else:
        fields["vocab_size"] = settings.vocab_size
        if settings.separate_vocabularies:
            fields["share_encoder_decoder_embeddings"] = False
            fields["decoder_vocab_size"] = settings.target_vocab_size or settings.vocab_size
    return VanillaTransformerConfig(**fields)
