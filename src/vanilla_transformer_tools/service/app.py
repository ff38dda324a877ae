"""LibreTranslate's HTTP API in front of a `Batcher`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vanilla_transformer_tools.service.batcher import Batcher, ClosedError, QueueFullError, Results
from vanilla_transformer_tools.service.connections import (
    allowed_hosts,
    of_own_origin,
    report_failed_accepts_once,
)
from vanilla_transformer_tools.service.requests import (
    FORM,
    RefusedError,
    TranslationRequest,
    most_bytes,
    split_lines,
)
from vanilla_transformer_tools.service.translators import AUTOMATIC, Translators
from vanilla_transformer_tools.settings import ServeSettings
from vanilla_transformer_tools.translation.marks import can_align
from vanilla_transformer_tools.translation.markup import Split, split_html
from vanilla_transformer_tools.translation.segments import join_pieces

logger = logging.getLogger(__name__)

# For the whole body of a request.
_BODY_SECONDS = 30
# The status of nginx for a client that has closed the connection; nobody reads it.
_CLIENT_GONE = 499


class Service:
    """The service that answers requests.

    Args:
        translators: Translators of the requests.
        settings: Limits and callers of the service.
    """

    def __init__(self, translators: Translators, settings: ServeSettings) -> None:
        self.translators = translators
        self.settings = settings
        self.metrics = translators.metrics
        self.open_requests = 0
        self.batcher = Batcher(
            translators,
            max_tokens=translators.first.max_tokens_per_batch,
            max_delay=settings.max_delay / 1000,
            max_waiting_characters=settings.max_waiting_characters,
        )
        self.metrics.waiting_characters.set_function(lambda: self.batcher.waiting_characters)

    async def translate(self, request: Request) -> Response:
        """The translation of a text, or of each text of a list."""
        if self.open_requests >= (most := self.settings.max_requests):
            raise RefusedError(
                429, f"At most {most:,} requests may wait, got one more. Try again later."
            )
        self.open_requests += 1
        try:
            started = time.perf_counter()
            query = request.scope["query_string"]
            body = await _read_body(request, most_bytes(self.settings))
            content_type = request.headers.get("content-type", "")
            if body and query:
                raise RefusedError(
                    400, "The fields must come in the body or in the query string, got both."
                )
            if request.headers.get("content-encoding", "identity") != "identity":
                raise RefusedError(
                    415, "The body must not be compressed; send no Content-Encoding."
                )
            if query:
                # A form, which some clients send as part of the address.
                body, content_type = query, FORM
            translation = TranslationRequest.of(body, content_type, self.settings)
            answer = await self._answer(request, translation)
            self.metrics.request_seconds.observe(time.perf_counter() - started)
            return JSONResponse(answer)
        finally:
            self.open_requests -= 1

    async def _answer(self, request: Request, wanted: TranslationRequest) -> dict[str, Any]:
        try:
            kind = self.translators.kind(wanted.source, wanted.target, wanted.alternatives)
            first = self.translators.first
            # Tags must follow their words.
            if wanted.is_html and not can_align(first.tokenizers, first.engine):
                raise ValueError("`format` html needs a service with --engine torch or auto.")
            if wanted.is_html:
                split: list[Split] = [*map(split_html, wanted.texts)]
            else:
                split = [*map(split_lines, wanted.texts)]
        except ValueError as error:
            raise RefusedError(400, str(error)) from error
        try:
            future = self.batcher.submit(kind, [line for lines, _ in split for line in lines])
        except (QueueFullError, ClosedError) as error:
            status = 429 if isinstance(error, QueueFullError) else 503
            raise RefusedError(status, str(error)) from error
        try:
            parts = iter(await _result(request, future))
        except ClientDisconnect:
            raise
        except Exception as error:
            # In one line: anybody may send such texts again and again.
            logger.error("A translation has failed: %s: %.200r", type(error).__name__, str(error))
            raise RefusedError(500, f"The translation failed: {type(error).__name__}.") from error
        answer: dict[str, list[Any]] = {"translatedText": [], "alternatives": []}
        count = 1 + kind.alternatives
        for lines, join in split:
            # Of each line, from those of its parts; a blank line has none, and itself.
            of_lines = [
                [*map(join_pieces, zip(*found, strict=True))] or [str(line)] * count
                for line, found in zip(lines, parts, strict=False)
            ]
            best, *others = (join([line[rank] for line in of_lines]) for rank in range(count))
            answer["translatedText"].append(best)
            answer["alternatives"].append(others)
        if not wanted.alternatives:
            del answer["alternatives"]
        if wanted.source == AUTOMATIC:
            # Clients read it. The only language that is offered needs no detection.
            (source,) = self.translators.languages.sources
            detected = {"language": source, "confidence": 100.0}
            answer["detectedLanguage"] = [detected] * len(wanted.texts)
        return answer if wanted.is_list else {name: one for name, (one,) in answer.items()}

    async def languages(self, _: Request) -> Response:
        """Target languages of each source language."""
        served = self.translators.languages
        targets = list(served.targets)
        listed = [{"code": one, "name": one, "targets": targets} for one in served.sources]
        return JSONResponse(listed)

    async def detect(self, _: Request) -> Response:
        """A refusal: a translation model cannot detect the language of a text."""
        raise RefusedError(
            501,
            "This service does not detect languages, since its model only translates. Name the "
            "`source`; /languages lists them.",
        )

    async def health(self, _: Request) -> Response:
        """Whether requests are answered."""
        if not self.batcher.is_working:
            raise RefusedError(503, "No requests are answered: the service is stopping.")
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, _: Request) -> Response:
        """Counters for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def build_app(service: Service) -> Starlette:
    """The app of a service; when it is shut down, it answers the requests that it has accepted."""
    settings = service.settings
    hosts, origins = allowed_hosts(settings.host, settings.allowed_hosts), settings.allowed_origins

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        report_failed_accepts_once(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.batcher.close)

    reading, writing = ["GET", "HEAD"], ["POST"]
    routes = [
        Route("/translate", service.translate, methods=writing),
        Route("/languages", service.languages, methods=reading),
        Route("/detect", service.detect, methods=writing),
        Route("/health", service.health, methods=reading),
        Route("/metrics", service.show_metrics, methods=reading),
    ]
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=[*reading, *writing],
        allow_headers=["Content-Type"],
    )
    paths = {route.path for route in routes}
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_counted, requests=service.metrics.requests, paths=paths),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(of_own_origin, allowed=origins),
            *([cross_origin] if origins else []),
            Middleware(_with_plain_path),
        ],
        exception_handlers={HTTPException: _refused, ClientDisconnect: _gone, Exception: _failed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _with_plain_path(app: ASGIApp) -> ASGIApp:
    """Rejects paths with escapes, which a proxy may let pass as other paths."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if scope["type"] == "http" and b"%" in scope["raw_path"]:
            message = "The path must be written without escapes such as %2F."
            answer = await _refused(None, RefusedError(400, message))
        await answer(scope, receive, send)

    return answer


def _counted(app: ASGIApp, requests: Any, paths: Collection[str]) -> ASGIApp:
    """Counts requests by path and status; paths that are not among `paths` together."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in paths else "other"
            requests.labels(path, status).inc()

    return answer


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request, if it has at most `max_bytes` and comes in time."""
    body = bytearray()
    declared = int(request.headers.get("content-length", 0))
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            if declared <= max_bytes:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > max_bytes:
                        break
    except TimeoutError as error:
        raise RefusedError(
            408, f"The body must come within {_BODY_SECONDS} seconds, got {len(body):,} bytes."
        ) from error
    if max(declared, len(body)) > max_bytes:
        raise RefusedError(
            413, f"A body must have at most {max_bytes:,} bytes, got more. Send it in parts."
        )
    return bytes(body)


async def _result(request: Request, future: Future[Results]) -> Results:
    """What the batcher finds; a request whose client leaves before that leaves the queue."""
    answer = asyncio.wrap_future(future)
    departure = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait((answer, departure), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        departure.cancel()


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request | None, refusal: HTTPException) -> Response:
    headers = dict(refusal.headers or {})
    if refusal.status_code == 429:
        headers["Retry-After"] = "1"
    if refusal.status_code in (400, 415):
        # Whatever follows may belong to it.
        headers["Connection"] = "close"
    return JSONResponse({"error": refusal.detail}, refusal.status_code, headers)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"The translation failed: {type(error).__name__}."}, 500)
