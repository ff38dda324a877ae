"""Clients of a service, polite and rude, and what they should be answered."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import psutil
from transformers.utils.logging import disable_progress_bar

from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.translation import Translator

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from number_words import german

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
STORM_CLIENTS = 64
SECONDS = 120
# Weights of the kinds of requests.
KINDS = {
    "text": 70,
    "list": 10,
    "document": 8,
    "hangs up": 5,
    "body cut": 3,
    "invalid UTF-8": 3,
    "10 MB": 1,
}
# Kinds to which no answer comes.
UNANSWERED = ("hangs up", "body cut")


@dataclass(frozen=True)
class Expected:
    """Lines with the translations that the service must give.

    Attributes:
        translations: By line.
        seconds: That each line took, translated alone.
    """

    translations: dict[str, str]
    seconds: list[float]

    @classmethod
    def of(cls, options: Namespace) -> Self:
        """Translates the lines one at a time."""
        if options.test:
            read = dict.fromkeys(line for line in read_lines(options.test) if line.strip())
        else:
            numbers = random.Random(0).sample(range(1_000_000), options.lines)
            read = dict.fromkeys(map(german, numbers))
        disable_progress_bar()
        given = {"engine": options.engine, "num_beams": options.num_beams}
        translator = Translator.from_pretrained(
            options.model, **{name: value for name, value in given.items() if value is not None}
        )
        lines = list(islice(read, options.lines))
        list(translator.translate(lines[:1]))
        translations, times = {}, [time.perf_counter()]
        for line in lines:
            (found,) = translator.translate([line])
            translations[line] = found.text
            times.append(time.perf_counter())
        return cls(translations, [after - before for before, after in pairwise(times)])

    @property
    def speed(self) -> tuple[float, float, float]:
        """Lines per second, and the median and 99th percentile of seconds."""
        return len(self.seconds) / sum(self.seconds), *percentiles(self.seconds)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return ordered[round(0.5 * last)], ordered[round(0.99 * last)]


@dataclass(frozen=True)
class Stopped:
    """What SIGTERM did while clients waited.

    Attributes:
        answered: Clients that got their translation.
        waiting: Clients that waited.
        status: Of the process.
        seconds: From the signal to the end.
    """

    answered: int
    waiting: int
    status: int
    seconds: float

    @property
    def faults(self) -> int:
        """Clients without their translation, and a status that is not 0."""
        return self.waiting - self.answered + (self.status != 0)

    def __str__(self) -> str:
        return (
            f"{self.answered} of {self.waiting} waiting clients answered, status {self.status} "
            f"after {self.seconds:.1f} s"
        )


class ServiceProcess:
    """`vanilla-transformer serve` in a process of its own."""

    def __init__(self, options: Namespace) -> None:
        command = [
            sys.executable,
            "-m",
            "vanilla_transformer_tools.commands",
            "serve",
            "--port",
            "0",
        ]
        command += ["--source_language", "xx", "--target_language", "yy", "--model", options.model]
        for name in ("engine", "num_beams", "max_delay"):
            if getattr(options, name) is not None:
                command += [f"--{name}", str(getattr(options, name))]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        printed = []
        for line in self.process.stderr:
            printed.append(line)
            if " on http://" in line:
                break
        else:
            raise OSError(f"the service did not start:\n{''.join(printed)}")
        self.port = int(line.rpartition(":")[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def memory(self) -> int:
        """Resident bytes."""
        return psutil.Process(self.process.pid).memory_info().rss

    def connect(self) -> http.client.HTTPConnection:
        """A connection that may be used again."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def ask(self, *request: Any) -> tuple[int, Any]:
        """Status and content of an answer, on a connection of its own."""
        with closing(self.connect()) as connection:
            return send(connection, *request)

    def metric(self, name: str) -> float:
        """A number of /metrics."""
        _, content = self.ask(None, "", "GET", "/metrics")
        return float(content.partition(f"\nvanilla_transformer_{name} ")[2].partition("\n")[0])

    def stop_under_load(self, expected: Expected) -> Stopped:
        """Sends SIGTERM once all clients wait for an answer."""
        texts = ["\n".join(islice(expected.translations, 100))] * STORM_CLIENTS
        answer = "\n".join(expected.translations[line] for line in texts[0].split("\n"))
        with ThreadPoolExecutor(STORM_CLIENTS) as pool:
            waiting = [pool.submit(self.ask, as_json(text), JSON) for text in texts]
            while self.metric("waiting_characters") < 0.9 * sum(map(len, texts)):
                time.sleep(0.01)
            started = time.perf_counter()
            os.kill(self.process.pid, signal.SIGTERM)
            found = [attempt(one.result) for one in waiting]
        answered = sum(one == (200, {"translatedText": answer}) for one in found)
        status = self.process.wait(SECONDS)
        return Stopped(answered, len(texts), status, time.perf_counter() - started)


def send(
    connection: http.client.HTTPConnection,
    body: bytes | None,
    kind: str,
    method: str = "POST",
    path: str = "/translate",
) -> tuple[int, Any]:
    """Status and content of an answer."""
    connection.request(method, path, body, {"Content-Type": kind})
    response = connection.getresponse()
    content = response.read()
    is_json = response.headers["content-type"] == JSON
    return response.status, json.loads(content) if is_json else content.decode()


def attempt(call: Callable[[], tuple[int, Any]]) -> tuple[int, Any] | None:
    """What a call returns; None if no answer came."""
    try:
        return call()
    except (OSError, http.client.HTTPException):
        return None


def as_json(q: str | list[str]) -> bytes:
    """The body of a request."""
    return json.dumps({"q": q, "source": "xx", "target": "yy"}).encode()


def as_form(q: str) -> bytes:
    """The same as a form."""
    return urlencode({"q": q, "source": "xx", "target": "yy"}).encode()


def speed(service: ServiceProcess, expected: Expected, clients: int) -> tuple[float, float, float]:
    """Lines per second, and the median and 99th percentile of seconds, one line a request.

    Raises:
        ValueError: If an answer is not the one expected.
    """
    lines = list(expected.translations)

    def work(first: int) -> list[float]:
        seconds = []
        with closing(service.connect()) as connection:
            for line in lines[first::clients]:
                started = time.perf_counter()
                found = send(connection, as_json(line), JSON)
                seconds.append(time.perf_counter() - started)
                translation = expected.translations[line]
                if found != (200, {"translatedText": translation}):
                    raise ValueError(f"{line!r} must be {translation!r}, got {found}.")
        return seconds

    with ThreadPoolExecutor(clients) as pool:
        started = time.perf_counter()
        seconds = [each for part in pool.map(work, range(clients)) for each in part]
        rate = len(seconds) / (time.perf_counter() - started)
    return rate, *percentiles(seconds)


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        counts: By kind of request; see `Storm.send`.
        memory: Of the service, in bytes, at the start and after each quarter.
    """

    memory: list[int]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        """Answers that are wrong or missing."""
        return sum(found["wrong"] + found["lost"] for found in self.counts.values())


def storm(service: ServiceProcess, expected: Expected, requests: int, seed: int) -> Outcome:
    """Sends requests of all kinds from many clients, each on a connection of its own."""
    outcome = Outcome([service.memory])
    kinds = random.Random(seed).choices(list(KINDS), list(KINDS.values()), k=requests)
    counts = {kind: Counter() for kind in KINDS}
    lines = list(expected.translations)

    def run(number: int) -> tuple[str, list[str]]:
        rng = random.Random(f"{seed} {number}")
        return kinds[number], send_one(service, kinds[number], rng, lines, expected)

    with ThreadPoolExecutor(STORM_CLIENTS) as pool:
        for quarter in range(4):
            numbers = range(quarter * requests // 4, (quarter + 1) * requests // 4)
            for kind, noted in pool.map(run, numbers):
                counts[kind].update(noted)
            while service.metric("waiting_characters"):
                time.sleep(0.01)
            outcome.memory.append(service.memory)
    names = ("sent", "right", "wrong", "lost", "busy")
    outcome.counts = {kind: {name: counts[kind][name] for name in names} for kind in KINDS}
    return outcome


def send_one(
    service: ServiceProcess, kind: str, rng: random.Random, lines: list[str], expected: Expected
) -> list[str]:
    """Sends one request, again after each 429; what to count."""
    body, content_type, status, answer = request(kind, rng, lines, expected)
    if kind in UNANSWERED:
        leave(service.port, body, content_type, 0.5 if kind == "body cut" else 1.0)
        return ["sent", "right"]
    noted = ["sent"]
    while True:
        found = attempt(lambda: service.ask(body, content_type))
        if found is None:
            return [*noted, "lost"]
        if found[0] != 429:
            is_right = found[0] == status and (answer is None or found[1] == answer)
            return [*noted, "right" if is_right else "wrong"]
        noted.append("busy")
        time.sleep(0.02)


def request(
    kind: str, rng: random.Random, lines: list[str], expected: Expected
) -> tuple[bytes, str, int, Any]:
    """Body, content type, expected status and, of a translation, expected content."""
    if kind == "10 MB":
        return as_form("x" * 10**7), FORM, 413, None
    chosen = rng.choices(lines, k=rng.randint(2, 9))
    found = [expected.translations[line] for line in chosen]
    if kind == "list":
        return as_json(chosen), JSON, 200, {"translatedText": found}
    if kind == "document":
        ends = [rng.choice(("\n", "\r\n", "\n\n", "\n \n")) for _ in chosen]
        joined = ["".join(map("".join, zip(one, ends, strict=True))) for one in (chosen, found)]
        return as_form(joined[0]), FORM, 200, {"translatedText": joined[1]}
    body, content_type = (
        (as_json(chosen[0]), JSON)
        if rng.random() < 0.5
        else (
            as_form(chosen[0]),
            FORM,
        )
    )
    if kind == "invalid UTF-8":
        damage = (b'"}', b'\xff"}') if content_type == JSON else (b"q=", b"q=%ff")
        return body.replace(*damage), content_type, 400, None
    return body, content_type, 200, {"translatedText": found[0]}


def leave(port: int, body: bytes, content_type: str, share: float) -> None:
    """Sends a share of a body, and hangs up without reading."""
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body[: int(share * len(body))])
