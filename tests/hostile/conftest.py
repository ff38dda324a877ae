"""What hostile files are made of, and the limits under which they are read."""

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.saved_folder import describe_model_files, write_run

from ..commands.conftest import run, signals  # noqa: F401
from ..conftest import save_small_model

MOST_SECONDS = 20
MOST_BYTES = 2 * 2**30


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a record of its files."""
    tokenizer = VanillaTransformerTokenizer.train(
        ["ein wort und noch eins"], vocab_size=40, kind="char"
    )
    folder = tmp_path_factory.mktemp("hostile")
    save_small_model(folder, tokenizer)
    write_run(folder, {"files": describe_model_files(folder)})
    return folder


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Path:
    """An empty folder with a copy of the model, `M`, and a corpus, `a` and `b`."""
    shutil.copytree(model, tmp_path / "M")
    for name in ("a", "b"):
        (tmp_path / name).write_text("ein wort\n" * 30)
    return tmp_path


@contextmanager
def limited() -> Iterator[None]:
    """Ends what takes long, and refuses memory to what takes much."""

    def end(*_: int | FrameType | None) -> None:
        raise TimeoutError(f"took more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    signal.alarm(MOST_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def bound(path: Path, **_: Any) -> None:
    """Makes a socket."""
    import socket

    here = os.getcwd()
    # The paths of sockets are short.
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)
