"""Clients that hold connections without using them, and requests that can be read in two ways."""

import asyncio
import errno
import resource
import socket
import time
from contextlib import ExitStack, contextmanager

import pytest

from vanilla_transformer_tools.service import connections
from vanilla_transformer_tools.service.connections import (
    most_connections,
    report_failed_accepts_once,
    server_config,
)

from ..support.http_service import SECONDS, ask, serving, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
LARGE = b"x" * 20_000_000


async def app(scope, receive, send):
    """Answers `POST /body` when the body is there, all else at once."""
    if scope["type"] == "lifespan":
        return
    if scope["path"] == "/body":
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    body = LARGE if scope["path"] == "/large" else b"ok"
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connections, "SECONDS", 0.2)


@pytest.fixture(scope="module")
def served():
    with serving(server_config(app, log_config=None, lifespan="off")) as (server, port):
        yield server, port


@contextmanager
def connected(port, sent):
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        client.sendall(sent)
        yield client


def is_closed_by_the_server(client):
    try:
        while client.recv(2**20):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        GET,
        b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
        # The answer does not wait for the body.
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
        GET + b"\r\n" + GET,
    ],
    ids=["nothing", "half a header", "half a body", "half an ignored body", "after an answer"],
)
def test_client_that_keeps_the_server_waiting_is_disconnected(served, impatient, sent):
    with connected(served[1], sent) as client:
        assert is_closed_by_the_server(client)


def test_client_that_sends_a_byte_at_a_time_is_disconnected(served, impatient):
    head = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n"
    with connected(served[1], head) as client:
        client.settimeout(0.05)
        end = time.monotonic() + SECONDS
        is_open = True
        while is_open and time.monotonic() < end:
            try:
                client.sendall(b"x")
                is_open = bool(client.recv(1))
            except TimeoutError:
                pass
            except ConnectionError:
                is_open = False

    assert not is_open


def test_client_that_does_not_read_is_disconnected(served, impatient):
    server, port = served
    with connected(port, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        wait_until(lambda: server.server_state.connections)
        wait_until(lambda: not server.server_state.connections)


def test_client_that_makes_progress_is_waited_for(served, impatient):
    part = b"x" * 70_000
    head = f"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: {5 * len(part)}\r\n\r\n".encode()
    with connected(served[1], head) as client:
        for _ in range(5):
            client.sendall(part)
            time.sleep(0.1)

        assert client.recv(12) == b"HTTP/1.1 200"


def test_request_that_is_being_answered_has_time(served, impatient, monkeypatch):
    started = asyncio.Event()

    async def slow(scope, receive, send):
        started.set()
        await asyncio.sleep(0.4)
        await app(scope, receive, send)

    with serving(server_config(slow, log_config=None, lifespan="off")) as (_, port):
        assert ask(port, "GET", "/").status == 200


def test_oldest_waiting_connection_makes_room(served, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 5)
    _, port = served
    with ExitStack() as stack:
        first, *_, last = [stack.enter_context(connected(port, GET)) for _ in range(6)]

        assert is_closed_by_the_server(first)
        last.sendall(b"\r\n")
        assert last.recv(12) == b"HTTP/1.1 200"


def test_connections_stay_below_the_limit_of_files(monkeypatch):
    limits = {256: 64, 1024: 824, resource.RLIM_INFINITY: 4096}
    for files, most in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))

        assert most_connections() == most


def test_failed_accepts_are_reported_in_one_line(caplog):
    async def fail(times):
        loop = asyncio.get_running_loop()
        report_failed_accepts_once(loop)
        for _ in range(times):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() failed", "exception": error})

    asyncio.run(fail(1000))

    assert caplog.messages == [
        "Connections cannot be accepted: Too many open files. See `ulimit -n`."
    ]


POST = b"POST /body HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Host: b\r\n\r\n",
        POST.replace(b"\r\n", b"\n") + b"\n",
        b"GET http://other/ HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_request_that_can_be_read_in_two_ways_is_refused(served, sent):
    with connected(served[1], GET + b"\r\n" + sent + GET + b"\r\n") as client:
        received = b"".join(iter(lambda: client.recv(2**16), b""))

    assert received.count(b"HTTP/1.1 ") == 2
    assert b"\r\nconnection: close\r\n" in received.rpartition(b"HTTP/1.1 400 ")[2].lower()


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: 2\r\n\r\nok",
        POST + b"Transfer-Encoding: chunked\r\nX-A:\t b \r\nX_B:\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b'GET /a/b.c?d=%2F&e=[1] HTTP/1.0\r\nHost: [::1]:80\r\nCookie: a="b\xff"\r\n\r\n',
    ],
)
def test_usual_request_is_answered(served, sent):
    with connected(served[1], sent) as client:
        assert client.recv(12) == b"HTTP/1.1 200"
