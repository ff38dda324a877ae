"""Counters of a service, in Prometheus' format."""

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LINES = tuple(2**power for power in range(11))


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Memory and processor time.
        ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"namespace": "vanilla_transformer", "registry": self.registry}
        self.requests = Counter(
            "requests",
            "Requests by path and status; 499: the client closed the connection.",
            ("path", "status"),
            **own,
        )
        self.request_seconds = Histogram(
            "request_seconds",
            "Seconds from a translation request's header to its answer.",
            buckets=_SECONDS,
            **own,
        )
        self.batch_lines = Histogram(
            "batch_lines", "Lines, or pieces of long ones, of a batch.", buckets=_LINES, **own
        )
        self.batch_seconds = Histogram(
            "batch_seconds", "Seconds in which a batch was translated.", buckets=_SECONDS, **own
        )
        self.unknown_tokens = Counter(
            "unknown_tokens",
            "Unknown tokens of translations, shown as <unk> or replaced by source words.",
            **own,
        )
        self.waiting_characters = Gauge(
            "waiting_characters", "Characters of all requests that are not answered yet.", **own
        )

    def text(self) -> bytes:
        """All of them, as `/metrics` shows them."""
        return generate_latest(self.registry)
