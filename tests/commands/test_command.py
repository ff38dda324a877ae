"""What all commands share."""

import io
import sys
from types import SimpleNamespace

import pytest
from torch import distributed
from torch._utils import ExceptionWrapper

from vanilla_transformer_tools import threads
from vanilla_transformer_tools.commands import command as commands
from vanilla_transformer_tools.commands.outputs import write_rows
from vanilla_transformer_tools.files import looks_like_a_path


@pytest.mark.parametrize(
    ("name", "is_path"),
    [
        ("user/model", False),
        ("runs/de-en", True),
        ("run/de-en", False),
        ("de-en", True),
        ("../model", True),
        ("/model", True),
        ("~/model", True),
    ],
)
def test_path_is_distinguished_from_a_name_on_the_hub(name, is_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    assert looks_like_a_path(name) == is_path


def test_process_group_ends_with_the_command():
    def join(argv):
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    commands.run(join, [])
    assert not distributed.is_initialized()


def passed_on() -> ValueError:
    """An error as a loader of torch passes it on from its process."""
    try:
        raise ValueError("Line 1 must have a target.\nValueError: it has none.")
    except ValueError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ValueError, match="in DataLoader worker") as caught:
        wrapper.reraise()
    return caught.value


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("[/x/gloo/transport/tcp/pair.cc:55] Closed by peer [127.0.0.1]:1. Look."),
            "lost another process: Closed by peer [127.0.0.1]:1. It has ended, or did not answer "
            "for --ddp_timeout seconds",
        ),
        (
            distributed.DistBackendError("NCCL error in: x.cpp\nmore"),
            "lost another process: NCCL error in: x.cpp",
        ),
        (
            distributed.DistNetworkError("The client socket has timed out"),
            "lost another process: The client socket has timed out",
        ),
        (passed_on(), "Line 1 must have a target.\nValueError: it has none.\n"),
        (
            ImportError("It needs a package.\n\n  pip install x"),
            "It needs a package. pip install x\n",
        ),
    ],
)
def test_error_is_reported_without_what_surrounds_it(capsys, error, told):
    def command(argv):
        raise error

    with pytest.raises(SystemExit, match="2"):
        commands.run(command, [])

    assert capsys.readouterr().err.startswith(f"vanilla-transformer: {told}")


def test_threads_are_chosen_once_before_a_model_translates(run, folder, monkeypatch):
    counted = []
    cores = SimpleNamespace(use=lambda: counted.append("idle"))
    monkeypatch.setattr(threads, "IdleCores", lambda: cores)

    run("translate", "--model", folder, "--engine", "torch", "--max_extra_tokens", 2, "ja")

    assert counted == ["idle"]


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", b"30.1 \\xb1 1 \\u4e2d \\udcff\n"),
        # A name of a file that is no UTF-8.
        ("utf-8", b"30.1 \xc2\xb1 1 \xe4\xb8\xad \\udcff\n"),
    ],
)
def test_messages_survive_any_encoding_of_the_terminal(encoding, printed, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)

    commands.run(lambda _: print("30.1 \u00b1 1 \u4e2d \udcff"), [])

    assert terminal.buffer.getvalue() == printed


def test_results_are_utf_8_in_any_terminal(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)

    write_rows(None, ["\u4e2d"])

    assert terminal.buffer.getvalue() == b"\xe4\xb8\xad\n"
