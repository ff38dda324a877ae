"""Options and fixtures of all tests."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer

    from .models import Batch, Model

# Before any library reads it: no test reaches the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor does one write to the user's cache: without a cache, torch translates.
os.environ["VANILLA_TRANSFORMER_CACHE"] = ""


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, where half precision and worker processes are the defaults."""
    if config.option.markexpr.strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A process that only hands tests to others (`-n`) needs no models.
    if not config.getoption("numprocesses", None):
        # Until all is collected: what is imported is no garbage, and looking for some takes long.
        gc.disable()
        # Before warnings are errors.
        from . import models  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    """Shares: `--share 2/3` takes every third, beginning with the second."""
    parser.addoption("--share", default="1/1", help="N/M: of slow lists every Mth case, from N")
    parser.addoption("--share_of_files", default="1/1", help="N/M: every Mth file, from N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow examples, cases of slow tests that have several, and files."""
    first, step = map(int, config.getoption("--share").split("/"))
    first_file, step_of_files = map(int, config.getoption("--share_of_files").split("/"))
    files = list(dict.fromkeys(item.path for item in items))
    cases = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and (hasattr(item, "callspec") or item.path.parent.name == "examples")
    ]
    others = [item for place, item in enumerate(cases) if place % step != first - 1]
    left_out = [
        item
        for item in items
        if item in others or files.index(item.path) % step_of_files != first_file - 1
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Spares tests what takes longer than they do: collections, templates, pictures."""
    gc.freeze()
    gc.enable()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: None)
    if jinja2 := sys.modules.get("jinja2"):
        jinja2.Environment.compile = cache(jinja2.Environment.compile)


@pytest.fixture(scope="session")
def tokenizer() -> "VanillaTransformerTokenizer":
    """Letters, as many as the tiny model has entries."""
    from vanilla_transformer import VanillaTransformerTokenizer

    return VanillaTransformerTokenizer.train(
        ["abcdefghijklmnopqrstuvwxyz .,!?-'"], vocab_size=37, kind="char"
    )


@pytest.fixture
def tiny_config() -> "VanillaTransformerConfig":
    """The default switches in the sizes of `TINY`."""
    from vanilla_transformer import VanillaTransformerConfig

    from .models import TINY

    return VanillaTransformerConfig(**TINY)


@pytest.fixture
def tiny_model(tiny_config: "VanillaTransformerConfig") -> "Model":
    """A model of `tiny_config` with random parameters, in float32 and eval mode."""
    from .models import build_redrawn

    return build_redrawn(tiny_config)


@pytest.fixture
def batch() -> "Batch":
    """Three sentence pairs, B=3, S=7, T=5, padded on the right; each sentence ends in `</s>`."""
    import torch

    input_ids = torch.tensor(
        [[17, 5, 9, 30, 2, 0, 0], [8, 21, 36, 4, 11, 26, 2], [13, 2, 0, 0, 0, 0, 0]]
    )
    labels = torch.tensor([[6, 33, 19, 12, 2], [25, 7, 2, -100, -100], [10, 28, 14, 2, -100]])
    decoder_input_ids = torch.tensor([[1, 6, 33, 19, 12], [1, 25, 7, 2, 0], [1, 10, 28, 14, 2]])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "decoder_input_ids": decoder_input_ids,
        "labels": labels,
    }


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with status 2, and gives what it tells."""
    from vanilla_transformer_tools.commands import main

    def run_refused(*argv: object) -> str:
        with pytest.raises(SystemExit, match=r"^2$"):
            main([str(word) for word in argv])
        return capsys.readouterr().err

    return run_refused


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a text file, given its name and lines, and tells its path."""

    def write_file(name: str, *lines: str) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        return str(path)

    return write_file


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with 300 pairs of number words to train on, and 20 to choose a checkpoint on.

    No test changes it: writing it takes a second.
    """
    from number_words import write_corpus

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, train=300, validation=20, test=1)
    return folder


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """By name: folders of a pretrained model and of what it became here; no test changes them."""
    from vanilla_transformer_tools.interop.importing import import_model

    from .support.pretrained import save_pretrained_model

    @cache
    def make(name: str) -> tuple[Path, Path]:
        root = tmp_path_factory.mktemp(name)
        source = save_pretrained_model(name, root / "source")
        import_model(str(source), root / "imported")
        return source, root / "imported"

    return make


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser for all tests; each opens a page of its own."""
    from .support.browser import open_browser

    with open_browser() as browser:
        yield browser
