#!/usr/bin/env python
"""Load test of `vanilla-transformer serve` on the loopback address.

First the speed of 1, 8 and 64 clients with one line a request, against the same lines translated
one at a time without a service. Then requests of all kinds from 64 clients: texts, lists and
documents, clients that hang up, bodies that are cut, invalid UTF-8 and 10 MB texts. Every answer is
compared with translations computed beforehand. Memory is that of the service after each quarter.
Last, SIGTERM while all clients wait.

Example:
  python benchmarks/service.py --model runs/demo --requests 20000
  python benchmarks/service.py --model runs/de-en --test test.de --engine ctranslate2
"""

import argparse
import sys

from ratio_tables import head, row


def parse() -> argparse.Namespace:
    """Reads the options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", required=True, help="Folder of a trained model.")
    parser.add_argument("--test", help="Source lines (default: German number words).")
    parser.add_argument("--lines", type=int, default=1000, help="How many (default: 1000).")
    parser.add_argument("--engine", help="As for the command (default: its own).")
    parser.add_argument("--num_beams", type=int, help="As for the command (default: the model's).")
    parser.add_argument("--max_delay", type=float, help="As for the command (default: its own).")
    counts = {"type": int, "nargs": "+", "default": [1, 8, 64]}
    parser.add_argument("--clients", **counts, help="At a time (default: 1 8 64).")
    parser.add_argument("--requests", type=int, default=20_000, help="Of all kinds (20000).")
    parser.add_argument("--seed", type=int, default=1, help="Of the kinds (default: 1).")
    return parser.parse_args()


def main() -> None:
    """Prints three tables; ends with status 1 if an answer is wrong or missing."""
    options = parse()
    from neighbours import hardware_line
    from service_load import Expected, ServiceProcess, speed, storm

    expected = Expected.of(options)
    with ServiceProcess(options) as service:
        rows = [("none", *expected.speed)]
        rows += [(clients, *speed(service, expected, clients)) for clients in options.clients]
        print(f"{hardware_line()}\n\n{speed_table(rows)}\n", flush=True)
        outcome = storm(service, expected, options.requests, options.seed)
        stopped = service.stop_under_load(expected)
    print(f"{outcome_table(outcome.counts)}\n")
    print(f"service, MB: {', '.join(f'{size / 1e6:,.0f}' for size in outcome.memory)} {QUARTERS}")
    print(f"SIGTERM: {stopped}")
    if outcome.faults or stopped.faults:
        sys.exit(1)


QUARTERS = "(before, and after each quarter)"


def speed_table(rows: list[tuple[str | int, float, float, float]]) -> str:
    """Lines per second and seconds of a request, in ms; the first row is without a service."""
    (_, alone, _, _), *_ = rows
    header = head("clients", "lines/s", "against none", "p50, ms", "p99, ms")
    lines = [
        row(clients, f"{rate:,.0f}", f"{rate / alone:.2f}", f"{p50 * 1e3:.1f}", f"{p99 * 1e3:.1f}")
        for clients, rate, p50, p99 in rows
    ]
    return "\n".join((header, *lines))


def outcome_table(counts: dict[str, dict[str, int]]) -> str:
    """Requests of each kind: those answered as they must be, wrongly, or not at all."""
    header = head("request", "sent", "right", "wrong", "lost", "429 before")
    names = ("sent", "right", "wrong", "lost", "busy")
    lines = [row(kind, *(f"{found[name]:,}" for name in names)) for kind, found in counts.items()]
    total = (f"{sum(found[name] for found in counts.values()):,}" for name in names)
    return "\n".join((header, *lines, row("all", *total)))


if __name__ == "__main__":
    main()
