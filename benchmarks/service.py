#!/usr/bin/env python
"""Load test of `vanilla-transformer serve` on the loopback address.

First the speed of 1, 8 and 64 clients with one line a request, against the same lines translated
one at a time without a service. Then requests of all kinds from 64 clients: texts, lists and
documents, invalid UTF-8 and 10 MB texts. Every answer is compared with translations computed
beforehand. Memory is that of the service after each quarter.

Example:
  python benchmarks/service.py --model runs/demo --requests 20000
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lab import Report, benchmark_parser, megabytes, process_memory

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
STORM_CLIENTS = 64
SECONDS = 120
# Kinds of requests, and how often each is drawn.
KINDS = {
    "text": 70,
    "list": 10,
    "document": 8,
    "invalid UTF-8": 3,
    "10 MB": 1,
}
COUNTS = ("sent", "right", "wrong", "lost", "busy")


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", required=True, help="Folder of a trained model.")
    parser.add_argument("--test", help="Source lines (default: German number words).")
    parser.add_argument("--lines", type=int, default=1000, help="Number of lines (default: 1000).")
    parser.add_argument("--engine", help="Option of the command (default: its own).")
    parser.add_argument("--num_beams", type=int, help="Option of the command (default: its own).")
    counts = {"type": int, "nargs": "+", "default": [1, 8, 64]}
    parser.add_argument("--clients", **counts, help="Clients at a time (default: 1 8 64).")
    parser.add_argument("--requests", type=int, default=20_000, help="Of all kinds (20000).")
    return parser.parse_args()


def main() -> int:
    """Prints three tables; the exit status is 1 if an answer is wrong or missing."""
    options = parse()
    report = Report(options.output)
    expected, alone = translate_alone(options)
    with running_service(options) as service:
        report.table("Speed", "clients", "lines/s", "against none", "p50, ms", "p99, ms")
        unserved = speed(alone, sum(alone))
        report.row("none", *speed_cells(unserved, unserved))
        for clients in options.clients:
            served = speed(*ask_lines(service, expected, clients))
            report.row(clients, *speed_cells(served, unserved))
        memory, counts = storm(service, expected, options.requests)
    report.table("Requests", "request", "sent", "right", "wrong", "lost", "429 before")
    for kind, found in (counts | {"all": sum(counts.values(), Counter())}).items():
        report.row(kind, *(f"{found[name]:,}" for name in COUNTS))
    report.add(f"\nservice, MB, before and after each quarter: {', '.join(megabytes(*memory))}")
    return int(faults(counts) > 0)


def translate_alone(options: argparse.Namespace) -> tuple[dict[str, str], list[float]]:
    """The translation that the service must give of each line, and the seconds of each alone."""
    # Imported late: they load torch, and `--help` should answer at once.
    from transformers.utils.logging import disable_progress_bar

    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    from number_words import german
    from vanilla_transformer_tools.files import read_lines
    from vanilla_transformer_tools.translation import Translator

    if options.test:
        read = dict.fromkeys(line for line in read_lines(options.test) if line.strip())
    else:
        read = dict.fromkeys(map(german, random.Random(0).sample(range(10**6), options.lines)))
    disable_progress_bar()
    settings = {name: getattr(options, name) for name in ("engine", "num_beams")}
    settings = {name: value for name, value in settings.items() if value is not None}
    translator = Translator.from_pretrained(options.model, **settings)
    lines = list(islice(read, options.lines))
    list(translator.translate(lines[:1]))
    expected, seconds = {}, []
    for line in lines:
        started = time.perf_counter()
        (found,) = translator.translate([line])
        seconds.append(time.perf_counter() - started)
        expected[line] = found.text
    return expected, seconds


class Service:
    """A service on a port of the loopback address, in a process of its own."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port, self.process = port, process

    def memory(self) -> int:
        """Resident bytes."""
        return process_memory("VmRSS", self.process.pid)

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
def running_service(options: argparse.Namespace) -> Any:
    """`vanilla-transformer serve` in a process of its own."""
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands", "serve", "--port", "0"]
    command += ["--source_language", "xx", "--target_language", "yy", "--model", options.model]
    for name in ("engine", "num_beams"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        printed = []
        for line in process.stderr:
            printed.append(line)
            if " on http://" in line:
                break
        else:
            raise OSError(f"the service did not start:\n{''.join(printed)}")
        yield Service(int(line.rpartition(":")[2]), process)
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


def attempt(call: Callable[[], tuple[int, Any]]) -> tuple[int, Any] | None:
    """What a call returns; None if no answer came."""
    try:
        return call()
    except (OSError, http.client.HTTPException):
        return None


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


def speed(seconds: list[float], total: float) -> tuple[float, float, float]:
    """Lines per second, and the median and 99th percentile of the seconds of a line."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return len(seconds) / total, ordered[round(0.5 * last)], ordered[round(0.99 * last)]


def speed_cells(found: tuple[float, float, float], alone: tuple[float, float, float]) -> list[str]:
    """Lines per second, also against those without a service, and milliseconds of a request."""
    rate, *seconds = found
    times = [f"{1000 * each:.1f}" for each in seconds]
    return [f"{rate:,.0f}", f"{rate / alone[0]:.2f}", *times]


def storm(
    service: Service, expected: dict[str, str], requests: int, seed: int = 1
) -> tuple[list[int], dict[str, Counter[str]]]:
    """Sends requests of all kinds from many clients, each on a connection of its own.

    Returns:
        Memory of the service in bytes, before and after each quarter, and `COUNTS` by kind.
    """
    memory = [service.memory()]
    kinds = random.Random(seed).choices(list(KINDS), list(KINDS.values()), k=requests)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}

    def run(number: int) -> tuple[str, list[str]]:
        rng = random.Random(f"{seed} {number}")
        return kinds[number], send_one(service, kinds[number], rng, expected)

    with ThreadPoolExecutor(STORM_CLIENTS) as pool:
        for quarter in range(4):
            numbers = range(quarter * requests // 4, (quarter + 1) * requests // 4)
            for kind, noted in pool.map(run, numbers):
                counts[kind].update(noted)
            while service.waiting():
                time.sleep(0.01)
            memory.append(service.memory())
    return memory, counts


def faults(counts: dict[str, Counter[str]]) -> int:
    """Answers that are wrong or missing."""
    return sum(found["wrong"] + found["lost"] for found in counts.values())


def send_one(
    service: Service, kind: str, rng: random.Random, expected: dict[str, str]
) -> list[str]:
    """Sends one request, again after each 429; what to count."""
    body, content_type, status, answer = request(kind, rng, expected)
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
