"""Tensors by name from the files of others: safetensors, or PyTorch's own without running code."""

import argparse
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vanilla_transformer_tools.saved_folder import shards_in

# Types in checkpoints of others that hold values and do nothing else.
_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [argparse.Namespace]
# Under these names, training scripts save weights beside other things.
_NAMES_OF_WEIGHTS = ("state_dict", "model_state_dict", "model")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def load_pickled(file: Path) -> Any:
    """The content of a file by `torch.save`; nothing in it is run.

    Raises:
        ValueError: If it holds objects whose loading could run code, or cannot be read.
        OSError: If there is no such file.
    """
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            # Weights of the optimiser, which are not needed, then take no memory.
            is_mapped = zipfile.is_zipfile(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (OSError, MemoryError):
        raise
    # A damaged file may fail in any of the loader's steps.
    except Exception as error:
        raise unreadable(str(file), error) from error


def unreadable(name: str, error: Exception) -> ValueError:
    """The error to report if torch's loader rejects weights.

    Args:
        name: Name of the file or the model.
        error: Error of the loader.
    """
    # Around it, torch advises to load the file without checks.
    inner = re.search(r"WeightsUnpickler error: (.*)", str(error))
    reason = " ".join((inner[1] if inner else str(error)).split()) or type(error).__name__
    if re.search(r"GLOBAL|[Uu]nsupported (?:global|class|type)|Can only build|Trying to", reason):
        match = re.search(r"GLOBAL (\S+)", reason)
        example = f", such as {match[1]}" if match else ""
        return ValueError(
            f"The weights of {name!r} must hold tensors and plain values only, got objects whose "
            f"loading may run code{example}. If you trust their source, convert them to "
            "safetensors, or save only settings and tensors."
        )
    return ValueError(
        f"The weights of {name!r} are damaged, or no file of tensors: {reason:.200}. Copy them "
        "again."
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the only model in a folder.

    Args:
        path: A file of safetensors or `torch.save`, or a folder with one, or with an index.

    Raises:
        ValueError: If there is not exactly one model, or a file is damaged or holds other things,
            or the tensor of another file.
        OSError: If there is no such path.
    """
    tensors: dict[str, Tensor] = {}
    for file in (check_shards(path) or _only_file(path)) if path.is_dir() else [path]:
        if file.suffix == ".safetensors":
            try:
                part = load_file(file)
            except SafetensorError as error:
                raise unreadable(str(file), error) from error
        else:
            part = tensors_in(load_pickled(file), file)
        if twice := tensors.keys() & part.keys():
            raise ValueError(
                f"The files of {str(path)!r} must hold each tensor once, got {min(twice)!r} in "
                f"{file.name!r} and in one before it. Copy the model again."
            )
        tensors |= part
    return tensors


def tensors_in(content: Any, file: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint: itself, or an entry of a usual name.

    Raises:
        ValueError: If there are other things, or no weights.
    """
    entries = content if isinstance(content, Mapping) else {}
    nested = (entries.get(name) for name in _NAMES_OF_WEIGHTS)
    entries = next((one for one in nested if isinstance(one, Mapping)), entries)
    others = [
        name
        for name, value in entries.items()
        if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if others or not entries:
        got = f"{others[0]!r}: {type(entries[others[0]]).__name__}" if others else "none"
        raise ValueError(
            f"{str(file)!r} must hold tensors by name, itself or under one of "
            f"{', '.join(_NAMES_OF_WEIGHTS)}, got {got}. Save `model.state_dict()`."
        )
    return dict(entries)


def check_shards(folder: Path) -> list[Path]:
    """The files that a folder's index lists; empty if it has no index.

    Raises:
        ValueError: If files are missing, or the index is damaged.
    """
    indices = sorted(folder.glob("*.index.json"))
    if not indices:
        return []
    names = sorted(set(shards_in(indices[0]).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ValueError(
            f"{str(folder)!r} must hold all files that its {indices[0].name} lists, got no "
            f"{', '.join(missing) or 'list'}. Copy the model again."
        )
    return [folder / name for name in names]


def _only_file(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if len(files) != 1:
        raise ValueError(
            f"{str(folder)!r} must hold one file of weights ({', '.join(_SUFFIXES)}), got "
            f"{', '.join(file.name for file in files) or 'none'}. Name the file itself."
        )
    return files
