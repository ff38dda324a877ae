"""Requests that wait share batches of a token budget; nothing here knows of HTTP or of models."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger(__name__)

# The best translation of a part of a line, and the alternatives.
Result = tuple[str, ...]
# Results of the parts of each line, in order.
Results = list[list[Result]]


class QueueFullError(Exception):
    """Too much is waiting already; the request may be sent again later."""


class ClosedError(Exception):
    """The batcher no longer accepts requests."""


@dataclass(frozen=True)
class Part:
    """A line, or a part of one that is too long, with the tokens that it counts for in a batch."""

    text: Any
    tokens: int


class Work(Protocol):
    """What a batcher has done in its thread, for requests of one kind at a time."""

    def cut(self, kind: Any, lines: Sequence[Any]) -> list[list[Part]]:
        """The parts of each line; none for a blank one."""

    def translate(self, kind: Any, texts: Sequence[Any]) -> Sequence[Result]:
        """A result for each text."""


@dataclass(eq=False)
class _Request:
    """What was submitted, and how far it is.

    The parts are those that no batch has taken yet, each with the index of its line. The results
    of each line's parts are in order, because batches take parts in order.
    """

    kind: Hashable
    lines: Sequence[Any]
    arrived: float
    answer: Future[Results] = field(default_factory=Future)
    is_cut: bool = False
    parts: deque[tuple[int, Part]] = field(default_factory=deque)
    results: Results = field(default_factory=list)

    @property
    def characters(self) -> int:
        """Those of its lines; line ends count too, since blank lines take time and memory."""
        return sum(map(len, self.lines)) + len(self.lines)

    def finish(self) -> None:
        if not self.parts:
            # It may have been cancelled meanwhile.
            with suppress(InvalidStateError):
                self.answer.set_result(self.results)

    def fail(self, error: BaseException) -> None:
        """Answers with an error that a client may see; any other would stop its server."""
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        with suppress(InvalidStateError):
            self.answer.set_exception(error)


class Batcher:
    """Collects requests, and has those of one kind translated together in a thread of its own.

    A batch takes one part from each waiting request in turn, so a long request delays short ones by
    a batch at most. It starts as soon as the thread is free and either the budget is full or the
    oldest request has waited for `max_delay`. A request whose future is cancelled leaves the queue.
    If a batch fails, its requests are tried one by one, so that only those at fault fail.

    Args:
        work: Object that cuts and translates.
        max_tokens: Most tokens of a batch, unless a single part has more.
        max_delay: Seconds that a request may wait for others while the thread is free.
        max_waiting_characters: Most characters of all requests that are not answered yet.
    """

    def __init__(
        self,
        work: Work,
        *,
        max_tokens: int,
        max_delay: float,
        max_waiting_characters: int,
    ) -> None:
        self.work = work
        self.max_tokens = max_tokens
        self.max_delay = max_delay
        self.max_waiting_characters = max_waiting_characters
        self.waiting_characters = 0
        # Oldest first; a dict, since any of them may be cancelled.
        self._waiting: dict[_Request, None] = {}
        self._is_closing = False
        self._changed = threading.Condition()
        # A daemon, so that a process that is forced to end does not wait for a batch.
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, kind: Hashable, lines: Sequence[Any]) -> Future[Results]:
        """Queues lines; the future holds the results of the parts of each line.

        Args:
            kind: Only requests of one kind share a batch.
            lines: Text.

        Raises:
            QueueFullError: If more would wait than is allowed.
            ClosedError: After `close`.
        """
        request = _Request(kind, lines, time.monotonic())
        request.answer.add_done_callback(lambda _: self._forget(request))
        with self._changed:
            if self._is_closing:
                raise ClosedError("The service is stopping and takes no more requests.")
            waiting = self.waiting_characters + request.characters
            if waiting > self.max_waiting_characters:
                raise QueueFullError(
                    f"At most {self.max_waiting_characters:,} characters may wait, got "
                    f"{request.characters:,} more than the {self.waiting_characters:,} that wait. "
                    "Try again later."
                )
            self.waiting_characters = waiting
            self._waiting[request] = None
            self._changed.notify()
        return request.answer

    @property
    def is_working(self) -> bool:
        """Whether requests are taken and answered."""
        return self._thread.is_alive() and not self._is_closing

    def hasten(self) -> None:
        """No request waits for others from now on."""
        with self._changed:
            self.max_delay = 0.0
            self._changed.notify()

    def close(self) -> None:
        """Takes no more requests, and returns when all that were taken are done."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _forget(self, request: _Request) -> None:
        with self._changed:
            self._waiting.pop(request, None)
            self.waiting_characters -= request.characters

    def _run(self) -> None:
        """Works until all is done; an error outside of a batch fails only what waits."""
        is_done = False
        while not is_done:
            try:
                while batch := self._next_batch():
                    self._translate(batch)
                is_done = True
            except BaseException as error:
                logger.exception("The batcher has failed; it goes on without what waited.")
                for request in list(self._waiting):
                    request.fail(error)

    def _next_batch(self) -> dict[_Request, list[tuple[int, Part]]]:
        """Waits for a batch: the parts of each request in it; none once all is done."""
        while True:
            with self._changed:
                # A cancelled request stays for a moment, until `_forget` is called.
                while not (waiting := [one for one in self._waiting if not one.answer.done()]):
                    if self._is_closing:
                        return {}
                    self._changed.wait()
                first = waiting[0]
                alike = [request for request in waiting if request.kind == first.kind]
                uncut = [request for request in alike if not request.is_cut]
                if not uncut:
                    rest = first.arrived + self.max_delay - time.monotonic()
                    tokens = (part.tokens for one in alike for _, part in one.parts)
                    if self._is_closing or rest <= 0 or sum(tokens) >= self.max_tokens:
                        return self._take(alike)
                    self._changed.wait(rest)
            if uncut:
                _attempt(self._cut, uncut)

    def _take(self, requests: list[_Request]) -> dict[_Request, list[tuple[int, Part]]]:
        """Takes the parts of a batch out of requests of one kind, whose lines are cut."""
        batch: dict[_Request, list[tuple[int, Part]]] = {}
        tokens = 0
        turns = deque(requests)
        while turns:
            request = turns.popleft()
            _, part = request.parts[0]
            tokens += part.tokens
            if batch and tokens > self.max_tokens:
                break
            batch.setdefault(request, []).append(request.parts.popleft())
            if request.parts:
                turns.append(request)
        for request in batch:
            del self._waiting[request]
            if request.parts:
                # At the end, so that those that have waited longer come first.
                self._waiting[request] = None
        return batch

    def _cut(self, requests: Sequence[_Request]) -> None:
        lines = [line for request in requests for line in request.lines]
        cut = iter(self.work.cut(requests[0].kind, lines))
        for request in requests:
            numbered = [(index, next(cut)) for index in range(len(request.lines))]
            request.parts = deque((index, part) for index, parts in numbered for part in parts)
            request.results = [[] for _ in request.lines]
            request.is_cut = True
            # Nothing is left to do for blank lines alone.
            request.finish()

    def _translate(self, batch: dict[_Request, list[tuple[int, Part]]]) -> None:
        def translate(requests: Sequence[_Request]) -> None:
            places = [(request, *taken) for request in requests for taken in batch[request]]
            texts = [part.text for _, _, part in places]
            results = list(self.work.translate(requests[0].kind, texts))
            for (request, index, _), result in list(zip(places, results, strict=True)):
                request.results[index].append(result)
            for request in requests:
                request.finish()

        open_requests = [request for request in batch if not request.answer.cancelled()]
        if open_requests:
            _attempt(translate, open_requests)


def _attempt(step: Callable[[Sequence[_Request]], None], requests: Sequence[_Request]) -> None:
    """Takes a step for all requests at once or, if that fails, for each of them alone."""
    try:
        step(requests)
    # Panics of tokenizers are no `Exception`.
    except BaseException as error:
        if len(requests) == 1:
            requests[0].fail(error)
            return
        logger.warning(
            "A batch of %d requests has failed and is repeated one by one: %.200s",
            len(requests),
            error,
        )
        for request in requests:
            _attempt(step, [request])
