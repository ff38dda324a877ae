"""Loading what a translator needs: engines, and defaults from the record of a training."""

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.saved_folder import RUN_FILE, check_files, load_model, read_run
from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.settings import EXPORT_FOLDER, EngineName
from vanilla_transformer_tools.text import sentences
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine, patience
from vanilla_transformer_tools.translation.engine import Engine
from vanilla_transformer_tools.translation.generation_settings import refuse_torch_only, torch_only
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

# Width D up to which CTranslate2 is several times as fast as torch on a CPU (docs/speed.md).
_NARROW = 256


def training_defaults(model_name_or_path: str) -> dict[str, Any]:
    """Arguments of a `Translator` that follow from the record of a model's training.

    `max_source_length` is the training's `max_length`, None if there is no record;
    `split_sentences` says whether its lines were single sentences, and `copy_without_letters`
    whether these nearly always had letters.

    Raises:
        ValueError: If the record is damaged.
    """
    run = read_run(model_name_or_path)
    settings = run.get("settings", {})
    length = settings.get("max_length") if isinstance(settings, dict) else settings
    if length is not None and not isinstance(length, int):
        raise ValueError(
            f"{RUN_FILE} of {model_name_or_path!r} must hold `settings` with a whole number as "
            f"`max_length`, got {length!r:.60}. Restore the file."
        )

    def is_at_most(name: str, most: float) -> bool:
        share = run.get(name)
        return isinstance(share, (int, float)) and share <= most

    is_split = is_at_most(sentences.INNER_ENDS, sentences.MOST_INNER_ENDS)
    has_letters = is_at_most(sentences.WITHOUT_LETTER, sentences.MOST_WITHOUT_LETTER)
    return {
        "max_source_length": length,
        "split_sentences": is_split,
        "copy_without_letters": is_split and has_letters,
    }


def load_engine(
    kind: EngineName, names: list[str], *, dtype: str, trust_remote_code: bool
) -> tuple[Engine, GenerationConfig]:
    """Loads what searches, onto a GPU if there is one, and the defaults of its searches.

    Several names are an ensemble. Models of other classes search in our layers where these compute
    the same. The dtype is that of the weights while they are used; `auto`: as saved.

    Raises:
        ValueError: If a model is not whole, or several are given to CTranslate2.
        ImportError: If CTranslate2 is asked for and is not installed.
    """
    if kind == "ctranslate2":
        return _load_export(names, dtype)
    loading = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    models = (in_our_layers(load_model(name, **loading)).to(device()) for name in names)
    engine = TorchEngine(*models)
    first, *others = (str(Search.of(model.generation_config)) for model in engine.models)
    for name, other in zip(names[1:], others, strict=True):
        if other != first:
            logger.warning(
                "The defaults are those of %s: %s. %s has: %s.", names[0], first, name, other
            )
    return engine, engine.model.generation_config


def device() -> torch.device:
    """The GPU, if there is one."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def in_our_layers(model: PreTrainedModel) -> PreTrainedModel:
    """One of our models with the weights of another class, where it computes the same.

    Elsewhere the model itself, which searches with its own `generate`; a warning says why.
    """
    if model.config.model_type == VanillaTransformerConfig.model_type:
        return model
    # Our own models need no tokenizers of other classes, which take long to import.
    from vanilla_transformer_tools.interop.importing import convert

    try:
        return convert(model)
    except ValueError as error:
        name = type(model).__name__
        logger.warning("%s translates with its own `generate`, more slowly: %s", name, error)
        return model


def faster_export(engine: Engine) -> str:
    """A line with the commands that make a small model several times faster; else nothing."""
    if not isinstance(engine, TorchEngine) or len(engine.models) > 1:
        return ""
    name, config = engine.model.name_or_path, engine.model.config
    if (
        # One that has just been converted from another class has no folder.
        not name
        or engine.model.device.type != "cpu"
        or config.model_type != VanillaTransformerConfig.model_type
        or config.d_model > _NARROW
        or config.d_k
        or config.d_v
        or config.talking_heads
        or torch_only(engine.model.generation_config)
    ):
        return ""
    # Only then `_own_export` can tell which weights an export in the model's folder has.
    is_known = Path(name).is_dir() and read_run(name).get("files")
    output, model = ("", "") if is_known else (" FOLDER", " --model FOLDER")
    return (
        "CTranslate2 translates this model several times faster: vanilla-transformer export "
        f"{name}{output}, then --engine ctranslate2{model}\n"
    )


def _load_export(names: list[str], dtype: str) -> tuple[Engine, GenerationConfig]:
    """Loads a folder that our export made."""
    if len(names) > 1:
        raise ValueError(
            f"The engine 'ctranslate2' takes one model, got {len(names)}: {', '.join(names)}. "
            "Use the engine 'torch' for an ensemble."
        )
    (folder,) = names
    check_files(folder)
    # First, because its errors explain what is wrong with a folder.
    exported = CTranslate2Engine(folder, compute_type="default" if dtype == "auto" else dtype)
    config = GenerationConfig.from_pretrained(folder)
    refuse_torch_only(config)
    if isinstance(config.eos_token_id, list) and len(config.eos_token_id) > 1:
        raise ValueError(
            "The engine 'ctranslate2' needs one `eos_token_id` in generation_config.json, got "
            f"{config.eos_token_id}. Use the engine `torch`."
        )
    exported.patience = patience(config)
    return exported, config


def folders_of(engine: EngineName, names: list[str]) -> list[str]:
    """The folders that an engine reads, with the tokenizers and the record that belong to them.

    Raises:
        ValueError: If one has weights for the other engine.
    """
    if engine == "ctranslate2":
        return list(map(_own_export, names))
    for name in names:
        if Path(name, "model.bin").exists():
            raise ValueError(
                f"{name!r} is an export to CTranslate2. Choose the engine 'ctranslate2' "
                f"(--engine ctranslate2), got {engine!r}."
            )
    return names


def _own_export(name: str) -> str:
    """The export in a model's folder, where `export` writes it by default; else the folder itself.

    Raises:
        ValueError: If it was made of other weights, by the checksums that both have recorded.
    """
    own = Path(name, EXPORT_FOLDER)
    if not own.is_dir():
        return name
    recorded = read_run(name).get("files")
    if not recorded or read_run(str(own)).get("exported_from") != recorded:
        raise ValueError(
            f"{str(own)!r} must be an export of the weights in {name!r}, got one of others. Delete "
            "it, and export the model again; to another folder if its run.json has no checksums."
        )
    return str(own)
