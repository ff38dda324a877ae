"""Commands in this process: what they print, and how they end."""

import io
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.translation import Translator

from ..models import save_small_model

LINES = ["ein hund rennt.", "ja", "", "der alte mann schläft", " ", "oh nein!", "x"]


class Outcome(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def signals() -> Iterator[None]:
    """Commands that react to signals do so until the end of a test."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    # A command that forgets one must not end the tests; jobs in the background ignore SIGINT.
    for signum in before:
        signal.signal(signum, signal.SIG_IGN)
    yield
    for signum, action in before.items():
        signal.signal(signum, action)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], signals: None
) -> Run:
    """Runs a command in this process, with bytes as its standard input."""

    def run_command(*argv: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = 0
        try:
            main([str(argument) for argument in argv])
        except SystemExit as error:
            status = error.code
        out, err = capsysbinary.readouterr()
        return Outcome(status, out.decode(), err.decode())

    return run_command


@pytest.fixture
def stdout_to(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sends standard output to a file descriptor."""
    with ExitStack() as stack:

        def send(descriptor: int) -> None:
            stream = stack.enter_context(open(descriptor, "w", encoding="utf-8"))
            monkeypatch.setattr(sys, "stdout", stream)

        yield send


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is a mistake here."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Translator, "from_pretrained", load)


def as_bytes(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture(scope="session")
def tokenizer() -> VanillaTransformerTokenizer:
    """Has tokens of several letters, and bytes for the others."""
    lines = [*LINES, "the old man sleeps", "hello there", "abcdefghijklmnopqrstuvwxyz"]
    return VanillaTransformerTokenizer.train(lines * 3, vocab_size=320)


@pytest.fixture(scope="session")
def folder(
    tokenizer: VanillaTransformerTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A saved model whose random weights write tokens of all kinds, byte tokens among them."""
    return save_small_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture
def translate(run: Run) -> Callable[..., tuple[int, bytes, str]]:
    """Runs `translate`; gives status, standard output in bytes and standard error."""

    def run_translate(*argv: object, stdin: bytes = b"") -> tuple[int, bytes, str]:
        status, out, err = run("translate", *argv, stdin=stdin)
        return status, out.encode(), err

    return run_translate
