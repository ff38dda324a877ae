"""The command `serve`: its options, and real processes that are told to stop."""

import json
import resource
import shutil
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlencode

import pytest

from vanilla_transformer_tools.commands.serve import _load
from vanilla_transformer_tools.settings import ServeSettings

from ..support.commands import command_server
from ..support.http_service import ask, wait_until
from .conftest import LINES

NAMES = ["--source_language", "de", "--target_language", "en"]
FORM = "application/x-www-form-urlencoded"


def translate(port, text, **fields):
    body = urlencode({"q": text, "source": "de", "target": "en", **fields})
    return ask(port, "POST", "/translate", body, content_type=FORM)


def test_missing_package_is_named_with_its_extra(run, no_model, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)

    outcome = run("serve", "--model", folder)

    assert outcome.status == 2
    assert "serve needs the package `starlette`" in outcome.err
    assert "pip install -e '.[serve]'" in outcome.err


def test_settings_reach_the_service(folder):
    settings = ServeSettings(
        model=[str(folder)],
        source_language="de",
        target_language="en",
        num_beams=2,
        max_tokens_per_batch=600,
        max_delay=7,
    )

    service = _load(settings)
    service.batcher.close()

    assert str(service.translators.languages) == "de -> en"
    assert service.batcher.max_delay == 0.007
    assert service.settings is settings
    assert service.translators.first.search.num_beams == 2
    assert service.batcher.max_tokens == 300


@pytest.fixture(scope="module")
def commands():
    with command_server() as server:
        yield server


@pytest.fixture
def start(commands, folder, tmp_path):
    """Starts `serve` on a free port; gives the process and the port."""

    def start_serving(*options):
        command = commands.start(
            tmp_path, "serve", "--model", folder, *NAMES, "--port", 0, *options
        )
        command.wait_until(lambda: is_ready(command))
        assert command.errors.startswith("translating de -> en on http://127.0.0.1:")
        return command, int(command.errors.rpartition(":")[2])

    return start_serving


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_finishes_what_was_taken_and_ends_with_status_0(start, signum):
    # All wait for more requests, until the signal comes.
    command, port = start("--max_delay", 60_000)
    with ThreadPoolExecutor(len(LINES)) as pool:
        answers = [pool.submit(translate, port, line) for line in LINES if line.strip()]
        wait_for_characters(port, sum(len(f"{line}\n") for line in LINES if line.strip()))
        command.signal(signum)
        translated = [answer.result(30) for answer in answers]

    assert command.wait(30) == 0
    assert [answer.status for answer in translated] == [200] * len(answers)
    assert all(answer.content["translatedText"] for answer in translated)
    assert command.errors.count("\n") == 1


def test_second_interrupt_ends_without_finishing(start):
    command, port = start()
    with ThreadPoolExecutor(1) as pool:
        text = f"{LINES[0]}\n" * 4000
        answer = pool.submit(translate, port, text)
        # After the last line end comes a blank line.
        wait_for_characters(port, len(f"{text}\n"))
        command.signal(signal.SIGINT)
        wait_until(lambda: is_closed(port))
        command.signal(signal.SIGINT)

        assert command.wait(10) == 128 + signal.SIGINT
        with pytest.raises(ConnectionError):
            answer.result(10)
        assert command.errors.count("\n") == 1


@pytest.mark.slow
def test_client_that_reads_nothing_does_not_keep_the_service_from_ending(start):
    command, port = start("--max_characters", 20_000_000, "--max_waiting_characters", 20_000_000)
    # A blank line is its own translation; the answer is larger than the buffers of sockets.
    body = json.dumps({"q": 8_000_000 * "\t", "source": "de", "target": "en"}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: client.recv(1, socket.MSG_PEEK))
        command.signal(signal.SIGTERM)

        assert command.wait(30) == 0


def test_idle_connections_neither_stop_the_service_nor_fill_its_log(start):
    command, port = start("--allowed_origins", "https://a.de", "--allowed_hosts", "b.de")
    # Far more connections than it may open files.
    resource.prlimit(command.pid, resource.RLIMIT_NOFILE, (256, 256))
    with ExitStack() as stack:
        for _ in range(400):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"POST /translate HTTP/1.1\r\nHost: loc")

        asked = {"host": "b.de", "origin": "https://a.de"}
        assert ask(port, "GET", "/health", **asked).content == {"status": "ok"}
        assert translate(port, "ja").status == 200
        command.signal(signal.SIGTERM)
        assert command.wait(30) == 0
    assert command.errors.count("\n") == 1


def test_text_at_which_the_tokenizer_panics_fails_alone(commands, folder, tmp_path):
    panicking = shutil.copytree(folder, tmp_path / "panicking")
    file = panicking / "tokenizer.json"
    content = json.loads(file.read_text())
    replacing = {"type": "Replace", "pattern": {"Regex": "(a+)+$x"}, "content": "b"}
    before = [content["normalizer"]] if content["normalizer"] else []
    content["normalizer"] = {"type": "Sequence", "normalizers": [*before, replacing]}
    file.write_text(json.dumps(content))
    options = ["--model", panicking, *NAMES, "--port", 0]
    command = commands.start(tmp_path, "serve", *options)
    command.wait_until(lambda: is_ready(command))
    port = int(command.errors.rpartition(":")[2])

    answers = [translate(port, text) for text in ("a" * 5000, "ja")]
    health = ask(port, "GET", "/health")
    command.signal(signal.SIGTERM)
    alone = commands.run(tmp_path, "translate", "--model", panicking, "a" * 5000)

    assert [answer.status for answer in (*answers, health)] == [500, 200, 200]
    assert command.wait(30) == 0
    assert alone.wait(1) == 2
    assert alone.errors.splitlines()[-1].startswith(
        "vanilla-transformer: a library failed at this input, most likely the tokenizer: Onig"
    )
    assert "Traceback" not in command.errors + alone.errors


def is_closed(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def is_ready(command):
    # The file is there once the process is.
    return command.errors_file.exists() and command.errors.endswith("\n")


def wait_for_characters(port, number):
    line = f"vanilla_transformer_waiting_characters {number:.1f}\n"
    wait_until(lambda: line in ask(port, "GET", "/metrics").content)
