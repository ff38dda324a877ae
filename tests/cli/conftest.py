"""Commands in this process: what they print, and how they end."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from vanilla_transformer.translation import Translator
from vanilla_transformer_cli import main


class Outcome(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
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
