"""What a service counts, in Prometheus' format."""

import time
from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from vanilla_transformer_tools.service.batcher import Part
from vanilla_transformer_tools.service.translators import RequestKind, Translators

_PREFIX = "vanilla_transformer"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LINES = tuple(2**power for power in range(11))


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Memory and processor time.
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            f"{_PREFIX}_requests",
            "Requests by path and status; 499: the client closed the connection.",
            ("path", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            f"{_PREFIX}_request_seconds",
            "Seconds from a translation request's header to its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.batch_lines = Histogram(
            f"{_PREFIX}_batch_lines",
            "Lines, or pieces of long ones, of a batch.",
            buckets=_LINES,
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            f"{_PREFIX}_batch_seconds",
            "Seconds in which a batch was translated.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.unknown_tokens = Counter(
            f"{_PREFIX}_unknown_tokens",
            "Unknown tokens of translations, shown as <unk> or replaced by source words.",
            registry=self.registry,
        )
        self.waiting_characters = Gauge(
            f"{_PREFIX}_waiting_characters",
            "Characters of all requests that are not answered yet.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """All of them, as `/metrics` shows them."""
        return generate_latest(self.registry)


class MeasuredTranslators:
    """The same work, measured."""

    def __init__(self, translators: Translators, metrics: Metrics) -> None:
        self.cut: Callable[[RequestKind, Sequence[str]], list[list[Part]]] = translators.cut
        self._translators = translators
        self._metrics = metrics

    def translate(self, kind: RequestKind, texts: Sequence[str]) -> list[tuple[str, ...]]:
        """The translations of each text, best first."""
        started = time.perf_counter()
        known = self._translators.unknown
        results = self._translators.translate(kind, texts)
        self._metrics.unknown_tokens.inc(self._translators.unknown - known)
        self._metrics.batch_lines.observe(len(texts))
        self._metrics.batch_seconds.observe(time.perf_counter() - started)
        return results
