"""Connections that no client can hold without using them, requests with one reading, and callers.

Uvicorn limits neither the time for a header nor, before it runs out of files, the connections.
"""

import asyncio
import re
import resource
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

# For a header, for a body and for reading an answer. A service answers slow bodies before that.
SECONDS = 35
# A client that sends or reads this many bytes in that time gets as much time again.
_LEAST_BYTES = 2**16
# Times that a connection is looked at in it.
_LOOKS = 10
_MOST_CONNECTIONS = 4096
# Connections that wait to be accepted.
WAITING = 100
# Asyncio accepts this many at once, and again before it has counted those before.
_ACCEPTED_AT_ONCE = 16
# Of the model, its engine, and connections that are accepted or closed but not counted yet.
_OTHER_FILES = 200

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


class Connection(H11Protocol):
    """A connection that is closed when its client keeps it waiting.

    A client sends a header or a body, or reads an answer, within `SECONDS`, or at least
    `_LEAST_BYTES` of it. When there are too many connections, the one that has waited longest for
    its client makes room; those whose requests are being answered stay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictConnection(h11.SERVER)
        self._received = 0
        # What it waits for, since when, and the bytes that had moved by then.
        self._wait: tuple[str, Any] = ("", None)
        self._since = 0.0
        self._moved = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for itself if there are too many."""
        super().connection_made(transport)
        self._look()
        if len(self.connections) > most_connections():
            others = [other for other in self.connections if isinstance(other, Connection)]
            waiting = [other for other in others if other._note()]
            oldest = min(waiting, key=lambda other: other._since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of the client."""
        self._received += len(data)
        super().data_received(data)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._since = self.loop.time()

    def _look(self) -> None:
        """Closes the connection if it has waited too long for its client, or looks again later."""
        if self._note() and self.loop.time() - self._since >= SECONDS:
            # Closing would first wait for the client to read everything.
            self.transport.abort()
        elif self in self.connections:
            self.loop.call_later(SECONDS / _LOOKS, self._look)

    def _note(self) -> bool:
        """Whether it waits for its client; begins anew if that is for something else, or more."""
        waits_for = ""
        if self.flow.write_paused:
            waits_for = "reading"
        elif self.cycle is None or self.cycle.response_complete:
            # Nobody reads the rest of a body after the answer.
            waits_for = "header"
        elif self.cycle.more_body:
            waits_for = "body"
        wait = waits_for, self.cycle
        moved = self._received - self.transport.get_write_buffer_size()
        if wait != self._wait or moved - self._moved >= _LEAST_BYTES:
            self._wait, self._moved, self._since = wait, moved, self.loop.time()
        return bool(waits_for)


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
