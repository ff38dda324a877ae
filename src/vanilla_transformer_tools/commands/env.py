"""The `env` command: facts about the machine for a bug report."""

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vanilla_transformer_tools.commands.command import Parser, parse

# The package, what it requires, and what its extras add.
_PACKAGES = (
    "vanilla-transformer",
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "sacrebleu",
    "safetensors",
    "huggingface_hub",
    "peft",
    "ctranslate2",
    "onnxruntime",
    "gradio",
    "starlette",
    "sentencepiece",
)
_EXAMPLE = """Paste it into a report; the home folder is written as ~.

example:
  vanilla-transformer env > machine.txt
"""


def env(argv: list[str]) -> None:
    """Print versions, devices, threads and caches."""
    parser = Parser(
        prog="vanilla-transformer env",
        description=env.__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parse(parser, argv)
    facts = _versions() | _machine() | _caches()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _versions() -> dict[str, str]:
    facts = {}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _machine() -> dict[str, str]:
    """Operating system, memory, devices and threads."""
    import psutil
    import torch

    devices = [
        f"{torch.cuda.get_device_name(index)}, "
        f"{torch.cuda.get_device_properties(index).total_memory / 1e9:.0f} GB"
        for index in range(torch.cuda.device_count())
    ]
    return {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "CUDA": torch.version.cuda or "torch is built without it",
        "GPUs": "; ".join(devices) or "none",
        "cores": str(os.cpu_count()),
        "threads": f"{torch.get_num_threads()} at most",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def _caches() -> dict[str, str]:
    """Folders of files that are kept between runs."""
    import datasets
    from huggingface_hub import constants

    from vanilla_transformer_tools.files import cache_folder

    return {
        "conversions": _without_home(cache_folder()),
        "token ids": _without_home(
            # An empty variable switches all caches off.
            cache_folder() and Path(datasets.config.HF_DATASETS_CACHE) / "vanilla_transformer"
        ),
        "models of the Hub": _without_home(Path(constants.HF_HUB_CACHE)),
    }


def _without_home(folder: Path | None) -> str:
    """A path that may be published."""
    if folder is None:
        return "nothing is kept"
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
