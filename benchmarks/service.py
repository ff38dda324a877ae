#!/usr/bin/env python
"""Load test of `vanilla-transformer serve` on the loopback address.

First the speed of 1, 8 and 64 clients with one line a request, against the same lines, German
number words, translated one at a time without a service. Then requests of all kinds from 64
clients: texts, lists and documents, invalid UTF-8 and 10 MB texts. Every answer is compared with
translations computed beforehand. Memory is that of the service after each quarter.

Example:
  python benchmarks/service.py --model runs/demo --requests 20000
"""

import http.client
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from transformers.utils.logging import disable_progress_bar

from lab import Report, benchmark_parser, megabytes, process_memory, seconds_of
from vanilla_transformer_tools.translation import Translator

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from number_words import german

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
CLIENTS = (1, 8, 64)
SECONDS = 120
# Kinds of requests, and how often each is drawn.
KINDS = {"text": 70, "list": 10, "document": 8, "invalid UTF-8": 3, "10 MB": 1}
COUNTS = ("sent", "right", "wrong", "lost", "busy")


def main() -> int:
    """Prints three tables; the exit status is 1 if an answer is wrong or missing."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", required=True, help="Folder of a trained model.")
    parser.add_argument("--lines", type=int, default=1000, help="Number of lines (default: 1000).")
    parser.add_argument("--num_beams", type=int, default=1, help="Hypotheses (default: 1).")
    parser.add_argument("--requests", type=int, default=20_000, help="Of all kinds (20000).")
    options = parser.parse_args()
    disable_progress_bar()
    report = Report(options.output)
    lines = list(map(german, random.Random(0).sample(range(10**6), options.lines)))
    expected, alone = translate_alone(options.model, options.num_beams, lines)
    with running_service(options.model, options.num_beams) as service:
        report.table("Speed", "clients", "lines/s", "against none", "p50, ms", "p99, ms")
        report.row("none", *speed_cells(alone, sum(alone), sum(alone)))
        for clients in CLIENTS:
            seconds, total = ask_lines(service, expected, clients)
            report.row(clients, *speed_cells(seconds, total, sum(alone)))
        memory, counts = storm(service, expected, options.requests)
    report.table("Requests", "request", "sent", "right", "wrong", "lost", "429 before")
    for kind, found in (counts | {"all": sum(counts.values(), Counter())}).items():
        report.row(kind, *(f"{found[name]:,}" for name in COUNTS))
    report.add(f"\nservice, MB, before and after each quarter: {', '.join(megabytes(*memory))}")
    return int(faults(counts) > 0)


def translate_alone(
    model: str, num_beams: int, lines: list[str]
) -> tuple[dict[str, str], list[float]]:
    """The translation that the service must give of each line, and the seconds of each alone."""
    translator = Translator.from_pretrained(model, num_beams=num_beams)
    list(translator.translate(lines[:1]))
    expected = {}

    def work(line: str) -> None:
        (found,) = translator.translate([line])
        expected[line] = found.text

    seconds = [seconds_of(partial(work, line)) for line in lines]
    return expected, seconds


class Service(NamedTuple):
    """A service on a port of the loopback address, in the process of this id."""

    port: int
    pid: int

    def connect(self) -> http.client.HTTPConnection:
        """A connection that may be used again."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def ask(self, *request: Any) -> tuple[int, Any]:
        """Status and content of an answer, on a connection of its own."""
        with closing(self.connect()) as connection:
            return send(connection, *request)

    def waiting(self) -> float:
        """Characters that wait for a translation."""
        _, content = self.ask(None, "", "GET", "/metrics")
        name = "\nvanilla_transformer_waiting_characters "
        return float(content.partition(name)[2].partition("\n")[0])


@contextmanager
def running_service(model: str, num_beams: int) -> Iterator[Service]:
    """`vanilla-transformer serve` in a process of its own."""
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands", "serve", "--port", "0"]
    command += ["--source_language", "xx", "--target_language", "yy"]
    command += ["--model", model, "--num_beams", str(num_beams)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        printed = []
        for line in process.stderr:
            printed.append(line)
            if " on http://" in line:
                break
        else:
            raise OSError(f"the service did not start:\n{''.join(printed)}")
        yield Service(int(line.rpartition(":")[2]), process.pid)
    finally:
        process.kill()
        process.communicate()


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


def body_of(q: str | list[str], encode: Callable[[Any], str] = json.dumps) -> bytes:
    """The body of a request, as JSON or as a form (`urlencode`)."""
    return encode({"q": q, "source": "xx", "target": "yy"}).encode()


def ask_lines(
    service: Service, expected: dict[str, str], clients: int
) -> tuple[list[float], float]:
    """Seconds of each request, one line each, and of all together.

    Raises:
        ValueError: If an answer is not the one expected.
    """
    lines = list(expected)

    def work(first: int) -> list[float]:
        seconds = []
        with closing(service.connect()) as connection:
            for line in lines[first::clients]:
                started = time.perf_counter()
                found = send(connection, body_of(line), JSON)
                seconds.append(time.perf_counter() - started)
                if found != (200, {"translatedText": expected[line]}):
                    raise ValueError(f"{line!r} must be {expected[line]!r}, got {found}.")
        return seconds

    with ThreadPoolExecutor(clients) as pool:
        started = time.perf_counter()
        seconds = [each for part in pool.map(work, range(clients)) for each in part]
        return seconds, time.perf_counter() - started


def speed_cells(seconds: list[float], total: float, alone: float) -> list[str]:
    """Lines per second, also against those without a service, and milliseconds of a request.

    Args:
        seconds: Seconds of each request.
        total: Seconds of all requests together.
        alone: Seconds of the same lines without a service.
    """
    ordered = sorted(seconds)
    places = (round(share * (len(ordered) - 1)) for share in (0.5, 0.99))
    times = [f"{1000 * ordered[place]:.1f}" for place in places]
    return [f"{len(seconds) / total:,.0f}", f"{alone / total:.2f}", *times]


def storm(
    service: Service, expected: dict[str, str], requests: int, seed: int = 1
) -> tuple[list[int], dict[str, Counter[str]]]:
    """Sends requests of all kinds from many clients, each on a connection of its own.

    Returns:
        Memory of the service in bytes, before and after each quarter, and `COUNTS` by kind.
    """
    memory = [process_memory("VmRSS", service.pid)]
    kinds = random.Random(seed).choices(list(KINDS), list(KINDS.values()), k=requests)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}

    def run(number: int) -> tuple[str, list[str]]:
        rng = random.Random(f"{seed} {number}")
        return kinds[number], send_one(service, *request(kinds[number], rng, expected))

    with ThreadPoolExecutor(CLIENTS[-1]) as pool:
        for quarter in range(4):
            numbers = range(quarter * requests // 4, (quarter + 1) * requests // 4)
            for kind, noted in pool.map(run, numbers):
                counts[kind].update(noted)
            while service.waiting():
                time.sleep(0.01)
            memory.append(process_memory("VmRSS", service.pid))
    return memory, counts


def faults(counts: dict[str, Counter[str]]) -> int:
    """Answers that are wrong or missing."""
    return sum(found["wrong"] + found["lost"] for found in counts.values())


def send_one(
    service: Service, body: bytes, content_type: str, status: int, answer: Any
) -> list[str]:
    """Sends one request, again after each 429; what to count."""
    noted = ["sent"]
    while True:
        try:
            found = service.ask(body, content_type)
        except (OSError, http.client.HTTPException):
            return [*noted, "lost"]
        if found[0] != 429:
            is_right = found[0] == status and (answer is None or found[1] == answer)
            return [*noted, "right" if is_right else "wrong"]
        noted.append("busy")
        time.sleep(0.02)


def request(kind: str, rng: random.Random, expected: dict[str, str]) -> tuple[bytes, str, int, Any]:
    """Body, content type, expected status and, of a translation, expected content."""
    if kind == "10 MB":
        return body_of("x" * 10**7, urlencode), FORM, 413, None
    chosen = rng.choices(list(expected), k=rng.randint(2, 9))
    found = [expected[line] for line in chosen]
    if kind == "list":
        return body_of(chosen), JSON, 200, {"translatedText": found}
    if kind == "document":
        ends = [rng.choice(("\n", "\r\n", "\n\n", "\n \n")) for _ in chosen]
        joined = ["".join(map("".join, zip(one, ends, strict=True))) for one in (chosen, found)]
        return body_of(joined[0], urlencode), FORM, 200, {"translatedText": joined[1]}
    is_json = rng.random() < 0.5
    content_type, encode = (JSON, json.dumps) if is_json else (FORM, urlencode)
    body = body_of(chosen[0], encode)
    if kind == "invalid UTF-8":
        damage = (b'"q": "', b'"q": "\xff') if is_json else (b"q=", b"q=%ff")
        return body.replace(*damage), content_type, 400, None
    return body, content_type, 200, {"translatedText": found[0]}


if __name__ == "__main__":
    sys.exit(main())
