"""The batcher: which lines share a batch, in what order, and what becomes of failures."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError

import pytest

from vanilla_transformer_tools.service.batcher import Batcher, ClosedError, Part, QueueFullError

SECONDS = 10


class Recorder:
    """Cuts lines at "|", one token a character; translates to capitals, and notes each batch.

    Attributes:
        batches: RequestKind and texts of each, in order.
        cut_lines: All lines that were cut.
        gate: Batches wait until it is set.
        faulty: Texts at which translating fails.
        uncuttable: Lines at which cutting fails.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[str]]] = []
        self.cut_lines: list[str] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.faulty: set[str] = set()
        self.uncuttable: set[str] = set()

    def cut(self, kind: str, lines: Sequence[str]) -> list[list[Part]]:
        if found := self.uncuttable & set(lines):
            raise ValueError(f"cannot cut {found}")
        self.cut_lines += lines
        return [[Part(text, len(text)) for text in line.split("|") if text] for line in lines]

    def translate(self, kind: str, texts: Sequence[str]) -> list[str]:
        self.batches.append((kind, list(texts)))
        self.began.release()
        assert self.gate.wait(SECONDS)
        if found := self.faulty & set(texts):
            raise RuntimeError(f"cannot translate {found}")
        return [f"{kind}:{text.upper()}" for text in texts]

    def block(self) -> None:
        self.gate.clear()

    def wait_for_batch(self) -> None:
        assert self.began.acquire(timeout=SECONDS)


@pytest.fixture
def work() -> Recorder:
    return Recorder()


@pytest.fixture
def start(work: Recorder) -> Iterator[object]:
    """Makes a batcher of `work`; each ends with the test."""
    made: list[Batcher] = []

    def make(**settings: float) -> Batcher:
        usual = {"max_tokens": 12, "max_delay": 0.0, "max_waiting_characters": 1000}
        made.append(Batcher(work, **{**usual, **settings}))
        return made[-1]

    yield make
    work.gate.set()
    for batcher in made:
        batcher.close()


@pytest.fixture
def occupied(start, work):
    """A batcher with a request whose batch lasts until the gate opens: what comes waits."""

    def make(**settings: float) -> Batcher:
        work.block()
        batcher = start(**settings)
        batcher.submit("busy", ["busy"])
        work.wait_for_batch()
        work.batches.clear()
        return batcher

    return make


def test_result_has_the_parts_of_each_line_in_order(start, work):
    batcher = start()

    # Blank lines alone need no batch.
    assert batcher.submit("k", ["", ""]).result(SECONDS) == [[], []]
    assert work.batches == []
    found = batcher.submit("k", ["b|a", "", "c", "|"]).result(SECONDS)
    assert found == [["k:B", "k:A"], [], ["k:C"], []]


def test_requests_of_one_kind_share_a_batch_and_the_oldest_comes_first(occupied, work):
    batcher = occupied()

    futures = [batcher.submit(kind, [kind + text]) for text in "xy" for kind in ("b", "a")]
    work.gate.set()

    found = [future.result(SECONDS) for future in futures]
    assert found == [[["b:BX"]], [["a:AX"]], [["b:BY"]], [["a:AY"]]]
    assert work.batches == [("b", ["bx", "by"]), ("a", ["ax", "ay"])]


def test_batch_has_at_most_its_budget_of_tokens(occupied, work):
    batcher = occupied(max_tokens=6)

    futures = [batcher.submit("k", [text]) for text in ("abc", "def", "g", "longest", "h")]
    work.gate.set()

    for future in futures:
        future.result(SECONDS)
    batches = [["abc", "def"], ["g"], ["longest"], ["h"]]
    assert [texts for _, texts in work.batches] == batches


def test_long_request_takes_turns_with_short_ones(occupied, work):
    batcher = occupied(max_tokens=3)

    long = batcher.submit("k", ["a|b|c", "d|e|f"])
    short = batcher.submit("k", ["x"])
    other = batcher.submit("other", ["y"])
    work.gate.set()

    assert long.result(SECONDS) == [["k:A", "k:B", "k:C"], ["k:D", "k:E", "k:F"]]
    assert (short.result(SECONDS), other.result(SECONDS)) == ([["k:X"]], [["other:Y"]])
    # The rest of the long one comes after what arrived meanwhile, of another kind too.
    assert work.batches == [
        ("k", ["a", "b", "x"]),
        ("other", ["y"]),
        ("k", ["c", "d", "e"]),
        ("k", ["f"]),
    ]


def test_lone_request_waits_for_others_until_its_deadline(start, work):
    batcher = start(max_delay=0.2)
    started = time.monotonic()
    futures = [batcher.submit("k", [text]) for text in "ab"]

    assert [future.result(SECONDS) for future in futures] == [[["k:A"]], [["k:B"]]]

    assert 0.2 <= time.monotonic() - started < 5
    assert work.batches == [("k", ["a", "b"])]


def test_neither_a_full_batch_nor_one_that_is_hastened_waits(start, work):
    batcher = start(max_delay=60, max_tokens=4)

    futures = [batcher.submit("k", [text]) for text in ("ab", "cd")]

    assert [future.result(5) for future in futures] == [[["k:AB"]], [["k:CD"]]]
    assert work.batches == [("k", ["ab", "cd"])]
    alone = batcher.submit("k", ["a"])
    batcher.hasten()
    assert alone.result(SECONDS) == [["k:A"]]
    assert batcher.submit("k", ["c"]).result(SECONDS) == [["k:C"]]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [("faulty", RuntimeError, "cannot translate"), ("uncuttable", ValueError, "cannot cut")],
)
def test_failing_batch_fails_only_the_request_at_fault(
    occupied, work, caplog, fault, error, message
):
    batcher = occupied()
    setattr(work, fault, {"bad"})

    futures = [batcher.submit("k", lines) for lines in (["one"], ["bad", "x"], ["two"])]
    work.gate.set()

    assert futures[0].result(SECONDS) == [["k:ONE"]]
    assert futures[2].result(SECONDS) == [["k:TWO"]]
    with pytest.raises(error, match=f"{message} .'bad'"):
        futures[1].result(SECONDS)
    assert batcher.submit("k", ["next"]).result(SECONDS) == [["k:NEXT"]]
    (warning,) = caplog.messages
    start = "A batch of 3 requests has failed and is repeated one by one: "
    assert warning.startswith(start + message)


def test_batcher_survives_its_own_failure(start, work, monkeypatch, caplog):
    batcher = start()
    monkeypatch.setattr(batcher, "_take", lambda alike: exit(1))
    with pytest.raises(RuntimeError, match="SystemExit"):
        batcher.submit("k", ["lost"]).result(SECONDS)
    monkeypatch.undo()

    assert batcher.submit("k", ["next"]).result(SECONDS) == [["k:NEXT"]]
    assert batcher.is_working
    assert batcher.waiting_characters == 0
    assert caplog.messages == ["The batcher has failed; it goes on without what waited."]


def test_cancelled_request_leaves_the_queue(occupied, work):
    batcher = occupied()
    kept, cancelled = batcher.submit("k", ["kept"]), batcher.submit("k", ["gone"])

    assert cancelled.cancel()
    assert batcher.waiting_characters == len("busy\n") + len("kept\n")
    assert cancelled not in [request.answer for request in batcher._waiting]
    work.gate.set()

    assert kept.result(SECONDS) == [["k:KEPT"]]
    assert work.batches == [("k", ["kept"])]
    assert work.cut_lines == ["busy", "kept"]
    with pytest.raises(CancelledError):
        cancelled.result(SECONDS)


def test_request_cancelled_during_its_batch_is_not_translated_further(start, work):
    batcher = start(max_tokens=4)
    work.block()
    long = batcher.submit("k", ["four", "more"])
    work.wait_for_batch()

    long.cancel()
    beside = batcher.submit("k", ["x"])
    work.gate.set()

    assert beside.result(SECONDS) == [["k:X"]]
    assert [texts for _, texts in work.batches] == [["four"], ["x"]]
    assert batcher.waiting_characters == 0


def test_too_many_waiting_characters_are_refused_and_room_comes_back(occupied, work):
    # Line ends count.
    batcher = occupied(max_waiting_characters=13)
    waiting = batcher.submit("k", ["abc", "def"])

    with pytest.raises(
        QueueFullError, match="At most 13 characters may wait, got 2 more than the 13"
    ):
        batcher.submit("k", ["x"])
    work.gate.set()

    assert waiting.result(SECONDS) == [["k:ABC"], ["k:DEF"]]
    batcher.submit("k", ["0123456789ab"]).result(SECONDS)


def test_closing_finishes_what_was_taken_and_takes_nothing_more(start, work):
    batcher = start(max_delay=60)
    closing = threading.Thread(target=batcher.close)
    futures = [batcher.submit("k", [text]) for text in ("one", "two")]

    closing.start()
    closing.join(SECONDS)

    assert not closing.is_alive()
    assert [future.result(0) for future in futures] == [[["k:ONE"]], [["k:TWO"]]]
    with pytest.raises(ClosedError, match="stopping"):
        batcher.submit("k", ["late"])
    batcher.close()
