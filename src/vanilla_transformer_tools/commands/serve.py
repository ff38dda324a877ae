"""The `serve` command: translations over HTTP."""

import asyncio
import signal
import socket
import sys
from contextlib import closing, suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from vanilla_transformer_tools.commands.command import (
    Parser,
    bind,
    build_parser,
    check_model,
    end_at_once,
    fail,
    interrupt,
    load_translator,
    parse,
)
from vanilla_transformer_tools.settings import ServeSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.service.app import Service

# For reading the last answers after a signal.
_READING_SECONDS = 10

_EXAMPLE = """The API is LibreTranslate's: POST /translate with q (a text or a list of them), source
and target, as JSON or as a form; GET /languages, /health and /metrics (Prometheus).
On Ctrl-C or SIGTERM the service answers the requests that it has accepted, and ends with status 0.

examples:
  vanilla-transformer serve --model runs/de-en --source_language de --target_language en
  curl http://127.0.0.1:5000/translate -d source=de -d target=en -d q='Ein Hund rennt.'
"""


def serve(argv: list[str]) -> None:
    """Answer requests for translations over HTTP, by LibreTranslate's API."""
    parser = build_parser(serve, ServeSettings, _EXAMPLE)
    settings = ServeSettings(**parse(parser, argv))
    check_model(parser, settings.model)
    _check(parser, settings)
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        fail(
            f"serve needs the package `{error.name}`, which is not installed. Install it: "
            "pip install -e '.[serve]'"
        )
    from vanilla_transformer_tools.service.connections import allowed_hosts, check_origins

    # Wrong hosts and origins, and a port that is taken, are reported before the model is loaded.
    allowed_hosts(settings.host, settings.allowed_hosts)
    check_origins(settings.allowed_origins)
    signal.signal(signal.SIGTERM, interrupt)
    with closing(bind(settings.host, settings.port)) as listener:
        _run(_load(settings), listener)


def _check(parser: Parser, settings: ServeSettings) -> None:
    counts = ("max_characters", "max_texts", "max_requests")
    ranges = {
        "port": (0, 2**16 - 1, f"from 0 to {2**16 - 1}"),
        "max_delay": (0, 60_000, "from 0 to 60000 milliseconds"),
        **{name: (1, float("inf"), "at least 1") for name in counts},
    }
    for name, (least, most, words) in ranges.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            parser.error(f"--{name} must be {words}, got {value:g}")
    if settings.max_waiting_characters < settings.max_characters:
        parser.error(
            "--max_waiting_characters must be at least --max_characters, or the longest requests "
            f"would never be taken, got {settings.max_waiting_characters} and "
            f"{settings.max_characters}"
        )


def _load(settings: ServeSettings) -> "Service":
    from vanilla_transformer_tools.service.app import Service
    from vanilla_transformer_tools.service.translators import ServedLanguages, Translators

    name = (settings.model or [""])[0]
    languages = ServedLanguages.load(
        name,
        settings.source_language,
        settings.target_language,
        trust_remote_code=settings.trust_remote_code,
    )
    source, target = languages.chosen(languages.sources[0], languages.targets[0])
    first = load_translator(replace(settings, source_language=source, target_language=target))
    return Service(Translators(first, languages), settings)


def _run(service: "Service", listener: socket.socket) -> None:
    """Answers until a signal comes; a second Ctrl-C ends without finishing."""
    import uvicorn

    from vanilla_transformer_tools.service.app import build_app
    from vanilla_transformer_tools.service.connections import WAITING, server_config

    host, port, *_ = listener.getsockname()
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    class Server(uvicorn.Server):
        """Reports when it is ready, and stops without delay."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit and sig == signal.SIGINT:
                end_at_once(sig)
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # Asyncio lets only as many wait as it accepts at once.
            listener.listen(WAITING)
            print(
                f"translating {service.translators.languages} on {address}",
                file=sys.stderr,
                flush=True,
            )

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.batcher.hasten()
            hanging_up = asyncio.create_task(self.hang_up())
            await super().shutdown(sockets)
            hanging_up.cancel()

        async def hang_up(self) -> None:
            """Disconnects clients that do not read their answers, once all have been translated."""
            while service.open_requests:
                await asyncio.sleep(0.1)
            await asyncio.sleep(_READING_SECONDS)
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    server = Server(server_config(build_app(service)))
    # Uvicorn passes the signal on when everything is finished.
    with suppress(KeyboardInterrupt):
        server.run([listener])
