"""A service on the loopback address, run by Uvicorn in a thread of this process."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from vanilla_transformer_tools.service.app import Service, build_app
from vanilla_transformer_tools.service.connections import server_config

SECONDS = 20


@dataclass(eq=False)
class Answer:
    """Status, headers and JSON of a response."""

    status: int
    headers: dict[str, str]
    content: Any


@dataclass
class RunningService:
    """A service that listens, and how to talk to it."""

    service: Service
    port: int
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        return ask(self.port, method, path, body, **headers)

    def translate(self, q: Any, source: Any = "de", target: Any = "en", **fields: Any) -> Answer:
        """A request as JSON."""
        body = json.dumps({"q": q, "source": source, "target": target, **fields})
        return self.send("POST", "/translate", body.encode(), content_type="application/json")


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request to a port of this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        response = connection.getresponse()
        read = response.read().decode()
        is_json = response.headers["content-type"] == "application/json"
        content = json.loads(read) if read and is_json else read
        return Answer(response.status, dict(response.headers), content)
    finally:
        connection.close()


@contextmanager
def running(service: Service, **callers: Any) -> Iterator[RunningService]:
    """Runs a service until the end of the block, which must leave it able to stop."""
    config = server_config(build_app(service, **callers), log_config=None, lifespan="on")
    with serving(config) as (server, port):
        yield RunningService(service, port, server)


@contextmanager
def serving(config: uvicorn.Config) -> Iterator[tuple[uvicorn.Server, int]]:
    """Runs Uvicorn in a thread until the end of the block; gives it and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()


def wait_until(condition: Any) -> None:
    """Waits for what another thread is about to do."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
