"""Connections that no client can hold without using them, requests with one reading, and callers.

Uvicorn limits neither the time for a header nor, before it runs out of files, the connections.
"""

import asyncio
import logging
import re
import resource
import time
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

# For a header, for a body and for reading an answer. A service answers slow bodies before that.
SECONDS = 35
# A client that sends or reads this many bytes in that time gets as much time again.
_LEAST_BYTES = 2**16
_MOST_CONNECTIONS = 4096
# Connections that wait to be accepted.
WAITING = 100
# Asyncio accepts this many at once, and again before it has counted those before.
_ACCEPTED_AT_ONCE = 16
# Of the model, its engine, and connections that are accepted or closed but not counted yet.
_OTHER_FILES = 200
_SECONDS_BETWEEN_REPORTS = 60

_HEAD_END = re.compile(rb"\n\r?\n")
# No line is continued on the next one, and all end alike. Only proxies get whole URLs.
_HEAD = re.compile(
    rb"[A-Z]+ /[!\"$-\[\]-~]* HTTP/1\.[01]\r\n(?:[\w!#$%&'*+.^`|~-]+:[^\r\n\0]*\r\n)*\r\n", re.ASCII
)
_FIELD = re.compile(rb"\n([^:\n]+):[ \t]*([^\r]*)")
_ONCE = (b"content-length", b"transfer-encoding", b"host", b"origin", b"content-type")
# Browsers send the host of the address that they call, and the origin of the page that calls. A
# foreign page can make its own host name lead to this machine, but cannot send another one.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"

_HOST = re.compile(r"\*|(\*\.)?[\w.-]+|\[[\da-fA-F:.]+\]")
_ORIGIN = re.compile(r"\*|[a-z][a-z\d+.-]*://[^/\s]+")


def server_config(app: Any, **settings: Any) -> uvicorn.Config:
    """Uvicorn's configuration for an app behind `Connection`.

    Args:
        app: ASGI app.
        settings: Further arguments of `uvicorn.Config`.
    """
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        # Warnings are one for each faulty request.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        backlog=_ACCEPTED_AT_ONCE,
        **settings,
    )


def most_connections() -> int:
    """Number of connections at a time, below the number of files that the process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(_MOST_CONNECTIONS, max(files - _OTHER_FILES, files // 4))


def report_failed_accepts_once(loop: asyncio.AbstractEventLoop) -> None:
    """Has connections that cannot be accepted reported in a line a minute.

    Asyncio writes a traceback for each, thousands a second, when the process has no more files.
    """
    last = -float("inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) - last >= _SECONDS_BETWEEN_REPORTS:
            last = now
            logger.error("Connections cannot be accepted: %s. See `ulimit -n`.", error.strerror)

    loop.set_exception_handler(handle)


class Connection(H11Protocol):
    """A connection that is closed when its client keeps it waiting.

    A client sends a header or a body, or reads an answer, within `SECONDS`, or at least
    `_LEAST_BYTES` of it. When there are too many connections, the one that has waited longest for
    its client makes room; those whose requests are being answered stay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictConnection(h11.SERVER)
        self._waits_for: str | None = None
        self._since = 0.0
        self._received = 0
        self._moved = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for itself if there are too many."""
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > most_connections():
            connections: list[Any] = list(self.connections)
            waiting = [other for other in connections if getattr(other, "_waits_for", None)]
            oldest = min(waiting, key=lambda other: other._since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Reads the data of the client."""
        self._received += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Waits for the next request, or begins with the one that has been sent already."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Waits for the client to read."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Waits for the client to read no longer."""
        super().resume_writing()
        self._watch()

    def _watch(self) -> None:
        """Starts the clock when the connection begins to wait for something else."""
        waits_for: str | None = None
        if self.flow.write_paused:
            waits_for = "reading"
        elif self.cycle is None or self.cycle.response_complete:
            # Nobody reads the rest of a body after the answer.
            waits_for = "header"
        elif self.cycle.more_body:
            waits_for = "body"
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self._since = self.loop.time()
            if self._timer:
                self._timer.cancel()
            self._timer = self._start_clock() if waits_for else None

    def _start_clock(self) -> asyncio.TimerHandle:
        self._moved = self._bytes_moved()
        return self.loop.call_later(SECONDS, self._close_if_slow)

    def _close_if_slow(self) -> None:
        if self._bytes_moved() - self._moved >= _LEAST_BYTES:
            self._timer = self._start_clock()
        else:
            # Closing would first wait for the client to read everything.
            self.transport.abort()

    def _bytes_moved(self) -> int:
        return self._received - self.transport.get_write_buffer_size()


class _StrictConnection(h11.Connection):
    """Rejects requests that another program, such as a proxy, may read differently."""

    def next_event(self) -> Any:
        """The next event, if it has only one reading."""
        if self.their_state is h11.IDLE:
            received, _ = self.trailing_data
            end = _HEAD_END.search(received)
            if end and not _has_one_reading(received[: end.end()]):
                raise h11.RemoteProtocolError("The request can be read in several ways.")
        return super().next_event()


def _has_one_reading(head: bytes) -> bool:
    if not _HEAD.fullmatch(head):
        return False
    values: dict[bytes, bytes] = {}
    for name, value in _FIELD.findall(head):
        if name.lower() in values and name.lower() in _ONCE:
            return False
        values[name.lower()] = value.strip()
    length = values.get(b"content-length")
    if b"transfer-encoding" in values:
        is_old = head.partition(b"\r\n")[0].endswith(b"1.0")
        return length is None and not is_old
    # h11 takes `5, 5` too.
    return length is None or length.isdigit()


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a server that listens on an address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(host: str, names: Sequence[str] = ()) -> list[str]:
    """Hosts that requests may name; `["*"]`: any.

    Args:
        host: Address that the server listens on.
        names: Further names of the server, such as `translate.example.org` or `*.example.org`.

    Raises:
        ValueError: If one of them is no name of a host.
    """
    if faults := [name for name in names if not _HOST.fullmatch(name)]:
        raise ValueError(
            "A host must be a name or an address without scheme and port, such as "
            f"translate.example.org, got {faults[0]!r}."
        )
    if not names and not is_loopback(host):
        return [ANY]
    return [*LOOPBACK_HOSTS, f"[{host}]" if ":" in host.strip("[]") else host, *names]


def check_origins(origins: Sequence[str]) -> None:
    """Checks the origins that may call a server.

    Raises:
        ValueError: If one of them is no origin.
    """
    if faults := [origin for origin in origins if not _ORIGIN.fullmatch(origin)]:
        raise ValueError(
            "An origin must be a scheme and a host, such as https://example.org, without a path, "
            f"got {faults[0]!r}."
        )


def of_own_origin(app: ASGIApp, allowed: Collection[str] = ()) -> ASGIApp:
    """An app that rejects requests from pages of foreign origins.

    Args:
        app: ASGI app that answers.
        allowed: Origins besides the server's own; `*`: any.
    """
    refusal = JSONResponse(
        {"error": "Pages of other origins may not call this server."}, 403, {"Connection": "close"}
    )

    def is_foreign(headers: Headers) -> bool:
        origin, own = headers.get("origin"), headers.get("host", "").lower()
        return bool(origin) and origin not in allowed and urlsplit(origin).netloc.lower() != own

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_checked = scope["type"] == "http" and ANY not in allowed
        is_refused = is_checked and is_foreign(Headers(scope=scope))
        await (refusal if is_refused else app)(scope, receive, send)

    return answer
