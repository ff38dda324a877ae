"""Who may call a server: a page of another host in somebody's browser may not, unless it is named.

Browsers send the host of the address that they call, and the origin of the page that calls. A
foreign page can make its own host name lead to this machine, but cannot send another one.
"""

import re
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"

_HOST = re.compile(r"\*|(\*\.)?[\w.-]+|\[[\da-fA-F:.]+\]")
_ORIGIN = re.compile(r"\*|[a-z][a-z\d+.-]*://[^/\s]+")


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
    faults = [name for name in names if not _HOST.fullmatch(name)]
    if faults:
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
    faults = [origin for origin in origins if not _ORIGIN.fullmatch(origin)]
    if faults:
        raise ValueError(
            "An origin must be a scheme and a host, such as https://example.org, without a path, "
            f"got {faults[0]!r}."
        )


class OwnOrigin:
    """Rejects requests from pages of foreign origins.

    Args:
        app: ASGI app that answers.
        allowed: Origins besides the server's own; `*`: any.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = ()) -> None:
        self.app = app
        self.allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        answer: ASGIApp = self.app
        if scope["type"] == "http" and ANY not in self.allowed:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            own = headers.get("host", "").lower()
            if origin and origin not in self.allowed and urlsplit(origin).netloc.lower() != own:
                answer = JSONResponse(
                    {"error": "Pages of other origins may not call this server."},
                    403,
                    {"Connection": "close"},
                )
        await answer(scope, receive, send)
