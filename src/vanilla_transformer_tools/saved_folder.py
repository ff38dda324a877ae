"""A saved model's folder: the names of its files, finding them, and loading it only if whole.

A record of sizes and checksums (`run.json` of a finished run, `files.json` of a checkpoint) lists
the files that results depend on. Nothing that differs from its record is loaded.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.files import checksum, looks_like_a_path, write_lines

# Written by training beside weights, tokenizer and code.
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
CARD_FILE = "README.md"
RESULTS_FILE = "results.json"

# The last file of a checkpoint: names, sizes and checksums of all others.
FILES_FILE = "files.json"

# The target's own tokenizer has a folder inside the model's; the source's is beside the weights.
TARGET_FOLDER = "target_tokenizer"
TARGET_FILES = (f"{TARGET_FOLDER}/tokenizer.json", f"{TARGET_FOLDER}/tokenizer_config.json")

# Of tokenizers without a tokenizer.json, as patterns.
VOCABULARY_FILES = ("*.spm", "*.model", "merges.txt", "*vocab.json", "vocab-*.json", "vocab.txt")

# Files that decide on what a saved model computes, as patterns; configs may be edited, so they are
# left out.
_RECORDED_FILES = (
    "model*.safetensors",
    "model.bin",
    "*_vocabulary.json",
    "onnx/*.onnx*",
    "model.safetensors.index.json",
    "tokenizer.json",
    *VOCABULARY_FILES,
    TARGET_FILES[0],
)
# Files of a folder that Transformers and a Translator take for JSON objects.
_OBJECT_FILES = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    RUN_FILE,
)
# Everything that translations depend on, as patterns.
_MODEL_FILES = (
    *_RECORDED_FILES,
    *_OBJECT_FILES,
    "*.safetensors",
    "*.bin",
    "*.index.json",
    "*.py",
)
_FILES_BESIDE_MODEL = (CARD_FILE, LOG_FILE, RESULTS_FILE, FILES_FILE)
# Ids without which no search runs.
_SEARCH_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


def local_folder(model_name_or_path: str) -> Path | None:
    """The folder of a model; None for a name on the Hub.

    Raises:
        FileNotFoundError: If the name is the path of a folder that does not exist.
    """
    folder = Path(model_name_or_path)
    if folder.is_dir():
        return folder
    if looks_like_a_path(model_name_or_path):
        raise FileNotFoundError(f"There is no folder {model_name_or_path!r}.")
    return None


def find_file(model_name_or_path: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a model, fetched from the Hub if need be; None where there is none.

    Raises:
        FileNotFoundError: As `local_folder` does.
    """
    local_folder(model_name_or_path)
    file = cached_file(
        model_name_or_path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def model_files(folder: Path) -> list[Path]:
    """The files of a saved model, including the target's own tokenizer.

    Checkpoints, the card, the log and the scores are left out, and so is what users keep there.
    """
    return [
        file
        for pattern in ("*", f"{TARGET_FOLDER}/*", "custom_generate/*")
        for file in sorted(folder.glob(pattern))
        if any(map(file.match, _MODEL_FILES)) and file.is_file()
    ]


def is_reserved_name(file: Path) -> bool:
    """Whether a file of this name, in a model's folder, is the model's or written next to it."""
    return any(map(file.match, (*_MODEL_FILES, *_FILES_BESIDE_MODEL)))


def read_generation_config(model_name_or_path: str) -> GenerationConfig:
    """The defaults of a model's searches; Transformers' where it was saved with none."""
    if find_file(model_name_or_path, GENERATION_CONFIG_NAME) is None:
        return GenerationConfig()
    return GenerationConfig.from_pretrained(model_name_or_path)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: If the file holds anything else.
    """
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} must hold a JSON object, got something that cannot be parsed: {error}. "
            "Restore the file."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file} must hold a JSON object, got a {type(value).__name__}. Restore the file."
        )
    return value


def check_objects(folder: Path) -> None:
    """Rejects a folder with a damaged JSON file, on which Transformers would fail obscurely.

    A damaged `generation_config.json` it would even ignore, and search otherwise.

    Raises:
        ValueError: If one holds anything but an object.
        OSError: If one cannot be read.
    """
    for name in _OBJECT_FILES:
        if (folder / name).exists():
            read_object(folder / name)


def read_run(model_name_or_path: str, revision: str | None = None) -> dict[str, Any]:
    """The record of the run that made a model; empty where there is none.

    Raises:
        ValueError: If the file is damaged.
    """
    file = find_file(model_name_or_path, RUN_FILE, revision)
    return read_object(file) if file else {}


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Writes the record of the run that made a model."""
    write_lines(folder / RUN_FILE, [json.dumps(run, indent=2)])


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each of a folder's files."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": checksum(folder / name)}
        for name in names
    }


def describe_model_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of the files that a saved model is computed from."""
    found = sorted(file for pattern in _RECORDED_FILES for file in folder.glob(pattern))
    return describe_files(folder, (file.relative_to(folder).as_posix() for file in found))


def check_files(model_name_or_path: str, revision: str | None = None) -> None:
    """Compares a model's files with the sizes and checksums recorded for them, if there are any.

    Raises:
        ValueError: If one differs.
    """
    record = find_file(model_name_or_path, FILES_FILE, revision)
    source = FILES_FILE if record else RUN_FILE
    files = (
        read_object(record) if record else read_run(model_name_or_path, revision).get("files", {})
    )
    if not isinstance(files, dict):
        raise ValueError(
            f"{source} of {model_name_or_path!r} must hold size and checksum of each file, got "
            f"{json.dumps(files):.60}. Restore it."
        )
    for name, expected in files.items():
        file = find_file(model_name_or_path, name, revision)
        if file and differs(file, expected):
            raise ValueError(
                f"{name} of {model_name_or_path!r} is not the file that was saved: its size or "
                f"checksum is not the one in {source}. Copy the model again; if you changed the "
                f"file on purpose, remove `files` from {RUN_FILE}."
            )


def shards_in(index: Path) -> dict[str, str]:
    """Name of the file of each tensor, from the index of weights in several files."""
    listed: dict[str, str] = read_object(index).get("weight_map") or {}
    if not listed:
        raise ValueError(f"{index} must have a `weight_map` of tensors. Copy the model again.")
    return listed


def differs(file: Path, expected: Any) -> bool:
    """Whether a file is not as recorded; the size is compared first, which costs nothing."""
    size = file.stat().st_size
    if not isinstance(expected, dict) or expected.get("bytes") != size:
        return True
    return expected != {"bytes": size, "sha256": checksum(file)}


def gpu_computes_bfloat16() -> bool:
    """Whether there is a GPU that computes in bfloat16; older ones emulate it slowly."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def load_model(model_name_or_path: str, **loading: Any) -> PreTrainedModel:
    """Loads a model whose weights are complete, finite and as they were saved.

    `from_pretrained` fills missing tensors with random numbers and only warns. Pickled weights are
    not read, unless `loading` has `use_safetensors=None`; no code in them ever runs.

    Args:
        model_name_or_path: As for `AutoModelForSeq2SeqLM`.
        loading: Further arguments of its `from_pretrained`.

    Raises:
        ValueError: If a tensor is missing, left over, of another shape or not finite, or if a file
            is damaged.
        OSError: If there is no such model, or it has no safetensors.
    """
    name = model_name_or_path
    loading = {"use_safetensors": True, "trust_remote_code": False, **loading}
    if folder := local_folder(name):
        check_objects(folder)
        if not (folder / CONFIG_NAME).exists():
            raise OSError(f"{name!r} must hold a saved model, got no {CONFIG_NAME}. Restore it.")
        is_pickled = (folder / WEIGHTS_NAME).is_file() and not any(folder.glob("*.safetensors"))
        if is_pickled and loading["use_safetensors"]:
            raise OSError(
                f"{name!r} must hold {SAFE_WEIGHTS_NAME}, got {WEIGHTS_NAME}, which only `import` "
                f"reads. Bring it in: vanilla-transformer import {name} FOLDER"
            )
    check_files(name, loading.get("revision"))
    with _without_load_report(), _naming_folder(name):
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            name,
            output_loading_info=True,
            # Reported below with all other faults.
            ignore_mismatched_sizes=True,
            **loading,
        )
    _check_tensors(model, report, name)
    align_weights(model)
    complete_ids(model)
    return model


def _check_tensors(model: PreTrainedModel, report: Mapping[str, Any], name: str) -> None:
    """Rejects a model whose tensors are not those of its config, or not finite."""
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    faults = [
        f"{len(names)} {fault} ({_some(names)})"
        for names, fault in (
            (report["missing_keys"], "missing"),
            (report["unexpected_keys"], "unknown to its config"),
            (mismatched, "of another shape than its config says"),
            (nonfinite_tensors(model), "not finite"),
        )
        if names
    ]
    if not faults:
        return
    cure = "Copy the model again, or train it again."
    if newer := _unknown_fields(model.config):
        cure = (
            f"Its config has {_some(newer)}, which vanilla-transformer "
            f"{version('vanilla-transformer')} does not know: a newer release has saved it. "
            "pip install --upgrade vanilla-transformer"
        )
    raise ValueError(
        f"{name!r} must hold exactly the tensors of its config, all finite, got "
        f"{'; '.join(faults)}. {cure}"
    )


def _unknown_fields(config: PreTrainedConfig) -> set[str]:
    """Fields of a config of ours that this release does not know; none of another class."""
    if not isinstance(config, VanillaTransformerConfig):
        return set()
    return {*config.to_dict()} - {*VanillaTransformerConfig().to_dict(), "auto_map"}


@contextmanager
def _naming_folder(model_name_or_path: str) -> Iterator[None]:
    """Names the folder in errors about damaged weights, and about code that was not run."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {model_name_or_path!r} are damaged: {error}. Copy the model again."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{model_name_or_path!r} wants to run code of its own (`auto_map` in its files), which "
            "was not run. If you have read that code and trust it, give --trust_remote_code to a "
            "command that has this option, or `trust_remote_code=True`."
        ) from error


def load_config(model_name_or_path: str) -> PreTrainedConfig:
    """The config of a model of any class whose code is installed.

    Raises:
        ValueError: If it needs code of the model's folder, or is damaged.
        OSError: If there is no such model.
    """
    local_folder(model_name_or_path)
    with _naming_folder(model_name_or_path):
        return AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=False)


def load_tokenizer(model_name_or_path: str, **loading: Any) -> PreTrainedTokenizerBase:
    """One tokenizer from a folder or the Hub, whatever its class, as `AutoTokenizer` loads it.

    Raises:
        ImportError: If it needs a package that is not installed.
        ValueError: If a folder holds none that can be loaded, or a damaged file.
        OSError: If there is neither a folder nor a model on the Hub of this name.
    """
    folder = local_folder(model_name_or_path)
    if folder:
        check_objects(folder)
    with _naming_folder(model_name_or_path):
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                model_name_or_path, **{"trust_remote_code": False, **loading}
            )
            return tokenizer
        # tokenizers raises bare exceptions, and the client of the Hub those of its connection.
        except Exception as error:
            if isinstance(error, (ImportError, OSError if folder else ValueError)):
                raise
            fault = " ".join(str(error).split())
            if not folder:
                raise OSError(
                    f"There is no folder {model_name_or_path!r}, and no model of that name could "
                    f"be loaded from the Hub: {fault}"
                ) from error
            fault = f"{type(error).__name__}: {fault}"
            if not any(any(folder.glob(file)) for file in ("tokenizer.json", *VOCABULARY_FILES)):
                fault = "no tokenizer.json"
            raise ValueError(
                f"{model_name_or_path!r} must hold a tokenizer that can be loaded, got {fault}. "
                "Restore its files."
            ) from error


def complete_ids(model: PreTrainedModel) -> None:
    """Fills in fields from the config that a search needs and the generation config lacks.

    A person may have written the generation config, without any ids.
    """
    for name in _SEARCH_IDS:
        if getattr(model.generation_config, name) is None:
            setattr(model.generation_config, name, getattr(model.config, name, None))


def nonfinite_tensors(model: nn.Module) -> list[str]:
    """Names of the weights that hold an infinity or NaN."""
    return [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
        # The sum takes a tenth of the time; of finite numbers it may overflow.
        and not tensor.sum().isfinite()
        and not tensor.isfinite().all()
    ]


def align_weights(model: nn.Module) -> None:
    """Copies weights to memory of torch's own.

    Those that are mapped from a safetensors file begin anywhere, and matrix products of such
    differ in their last bit from products of aligned ones: a resumed run would change.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def _some(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    named = sorted(names)
    return ", ".join(named[:3]) + f" and {len(named) - 3} more" * (len(named) > 3)


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Hides Transformers' table of missing and unexpected tensors, which becomes an error here."""
    logger = logging.getLogger("transformers.modeling_utils")

    # The level stays: at a higher one Transformers checks its plan to shard, which warns as well.
    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)
