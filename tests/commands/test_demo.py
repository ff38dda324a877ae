"""The command `demo`: what it serves, where, what it refuses, and how it ends."""

import signal
import socket
import sys
from types import SimpleNamespace

import pytest

from ..support.commands import command_server
from ..support.launching import free_port


@pytest.fixture
def served(monkeypatch):
    """What would be served; nothing is, and Ctrl-C comes at once."""
    calls = []

    class App:
        def close(self, verbose):
            calls.append("closed")

    def launch(page, **where):
        calls.append((page, where))
        return App(), "http://somewhere/"

    monkeypatch.setattr(
        "vanilla_transformer_tools.commands.demo._wait", lambda: signal.raise_signal(signal.SIGINT)
    )
    # Importing Gradio would take seconds.
    monkeypatch.setitem(
        sys.modules, "vanilla_transformer_tools.page.app", SimpleNamespace(launch=launch)
    )
    return calls


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_page_is_served_on_loopback_until_a_signal_comes(run, folder, served, monkeypatch, signum):
    def wait():
        signal.raise_signal(signum)
        pytest.fail("the signal was ignored")

    monkeypatch.setattr("vanilla_transformer_tools.commands.demo._wait", wait)

    status, out, _ = run("demo", "--model", folder)

    (page, where), last = served
    assert list(page.models) == [folder.name]
    assert where == {"host": "127.0.0.1", "port": None, "share": False, "hosts": []}
    assert (status, out, last) == (0, "The page is at http://somewhere/\n", "closed")


@pytest.mark.slow
def test_signal_closes_a_real_page_with_status_0(folder, tmp_path):
    port = free_port()
    with command_server() as commands:
        command = commands.start(tmp_path, "demo", "--model", folder, "--port", port)
        command.wait_until(lambda: command.output_file.exists() and command.output)
        with socket.create_connection(("127.0.0.1", port)) as reader:
            # A browser holds such a connection as long as the page is open.
            reader.sendall(b"GET /gradio_api/heartbeat/0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert reader.recv(12) == b"HTTP/1.1 200"
            command.signal(signal.SIGTERM)

            assert command.wait(4) == 0

    assert command.output == f"The page is at http://127.0.0.1:{port}/\n"
    assert command.errors == ""


def test_options_reach_the_page(run, folder, served, write):
    examples, port = write("lines.txt", "oh nein!"), free_port()
    run(
        *("demo", "--model", folder, folder, "--host", "0.0.0.0", "--port", port, "--share"),
        *("--examples", examples, "--dtype", "bfloat16", "--allowed_hosts", "a.de"),
    )

    (page, where), _ = served
    assert where == {"host": "0.0.0.0", "port": port, "share": True, "hosts": ["a.de"]}
    ((name, model),) = page.models.items()
    assert page.examples[name] == ["oh nein!"]
    assert str(model.translator.engine.model.dtype) == "torch.bfloat16"


def test_missing_gradio_is_told_with_its_cure(run, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "vanilla_transformer_tools.page.app", raising=False)

    status, _, err = run("demo", "--model", folder)

    assert status == 2
    assert err == (
        "vanilla-transformer: The page needs Gradio. Install it: pip install -e '.[demo]'\n"
    )
