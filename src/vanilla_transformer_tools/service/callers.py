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
