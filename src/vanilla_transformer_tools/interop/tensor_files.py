"""Tensors by name from the files of others: safetensors, or PyTorch's own without running code."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vanilla_transformer_tools.saved_folder import shards_in

# Under these names, training scripts save weights beside other things.
_NAMES_OF_WEIGHTS = ("state_dict", "model_state_dict", "model")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def unreadable(name: str, error: Exception) -> ValueError:
    """The error to report if a loader rejects the weights of a file or a model."""
    # Around it, torch advises to load the file without checks.
    inner = re.search(r"WeightsUnpickler error: (.*)", str(error))
    reason = " ".join((inner[1] if inner else str(error)).split()) or type(error).__name__
    return ValueError(
        f"The weights of {name!r} must be tensors that can be read without running code, got: "
        f"{reason:.200}. Copy them again; or, if you trust their source, save `model.state_dict()` "
        "as safetensors."
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file of safetensors or `torch.save`, or of the only model in a folder.

    Raises:
        ValueError: If there is not exactly one model, or a file is damaged or holds other things,
            or the tensor of another file.
        OSError: If a file is missing.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files_in(path) if path.is_dir() else [path]:
        part = _read_file(file)
        if twice := tensors.keys() & part.keys():
            raise ValueError(
                f"The files of {str(path)!r} must hold each tensor once, got {min(twice)!r} in "
                f"{file.name!r} and in one before it. Copy the model again."
            )
        tensors |= part
    return tensors


def _files_in(folder: Path) -> list[Path]:
    """The files that a folder's index lists, or its only one."""
    for index in sorted(folder.glob("*.index.json"))[:1]:
        return [folder / name for name in sorted({*shards_in(index).values()})]
    files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if len(files) != 1:
        raise ValueError(
            f"{str(folder)!r} must hold one file of weights ({', '.join(_SUFFIXES)}), got "
            f"{', '.join(file.name for file in files) or 'none'}. Name the file itself."
        )
    return files


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # What checkpoints have as their settings holds values and does nothing else.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    # A damaged file may fail in any of the loader's steps.
    except Exception as error:
        raise unreadable(str(file), error) from error
    return _tensors_in(content, file)


def _tensors_in(content: Any, file: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint: itself, or an entry of a usual name."""
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
