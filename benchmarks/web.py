#!/usr/bin/env python
"""Pages of `export --format web` in headless Chromium: speed, quality and size.

The pages take turns with each piece of the test set, on one core if the process has one
(`taskset -c 0`). Words are those of the source. Chromium and its driver must be installed.

Example:
  vanilla-transformer export --format web --quantization float32 runs/de-en page32
  vanilla-transformer export --format web runs/de-en page8
  taskset -c 0 python benchmarks/web.py --pages page32 page8 --test test.de.gz test.en.gz
"""

import functools
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from lab import Report, benchmark_parser, seconds_of
from vanilla_transformer_tools.files import read_lines

# A page takes 5,000 characters.
LINES_OF_A_PIECE = 20
PATIENCE = 120


class Page:
    """A page in a browser.

    Attributes:
        ready: Seconds from the request of the page until it can translate.
        first: Seconds of the first translation after that.
        outputs: Translations of what was typed since.
    """

    def __init__(self, browser: Any, address: str, line: str) -> None:
        self.browser = browser
        self.outputs: list[str] = []
        started = time.perf_counter()
        browser.get(address)
        self._wait("Ready")
        self.ready = time.perf_counter() - started
        self.first = seconds_of(functools.partial(self.translate, [line]))
        self.outputs.clear()

    def translate(self, lines: list[str]) -> None:
        """Types lines and waits for their translations."""
        self.browser.execute_script(
            "document.getElementById('status').textContent = '';"
            "const source = document.getElementById('source');"
            "source.value = arguments[0]; source.dispatchEvent(new Event('input'));",
            "\n".join(lines),
        )
        self._wait("Done")
        for fault in self.browser.find_elements("css selector", "#translations .fault"):
            raise ValueError(f"The page must translate each line, got {fault.text!r}.")
        self.outputs += self.browser.execute_script(
            "return [...document.querySelectorAll('#translations li')].map(one => one.textContent)"
        )

    def _wait(self, beginning: str) -> None:
        end = time.perf_counter() + PATIENCE
        while not (said := self.browser.find_element("id", "status").text).startswith(beginning):
            if time.perf_counter() > end or said.startswith(("Failed", "The model cannot")):
                raise RuntimeError(f"The page must say {beginning!r}, got {said!r}.")
            time.sleep(0.01)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of a static server of a folder, whose log goes to stderr."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def opened_browser() -> Iterator[Any]:
    """A headless Chromium."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def size(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Prints a table with a line for each page."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--pages", type=Path, nargs="+", required=True, help="Exported folders.")
    parser.add_argument("--test", nargs=2, required=True, help="Sources and references.")
    parser.add_argument("--lines", type=int, default=1000, help="Of the test set (default: 1000).")
    options = parser.parse_args()
    report, metrics = Report(options.output), (BLEU(), CHRF())
    sources, references = (list(islice(read_lines(file), options.lines)) for file in options.test)
    with ExitStack() as stack:
        pages = {}
        for folder in options.pages:
            address = stack.enter_context(served(folder))
            pages[folder] = Page(stack.enter_context(opened_browser()), address, sources[0])
        seconds = dict.fromkeys(pages, 0.0)
        for start in range(0, len(sources), LINES_OF_A_PIECE):
            piece = sources[start : start + LINES_OF_A_PIECE]
            for folder, page in pages.items():
                seconds[folder] += seconds_of(functools.partial(page.translate, piece))
    first, *_ = pages.values()
    scores = {
        folder: [metric.corpus_score(page.outputs, [references]).score for metric in metrics]
        for folder, page in pages.items()
    }
    words = sum(len(line.split()) for line in sources)
    columns = ("page", "MB", "runtime, MB", "ready, s", "first translation, s", "words/s")
    signatures = ", ".join(str(metric.get_signature()) for metric in metrics)
    note = f"{len(sources):,} lines, {words:,} words; {signatures}"
    report.table(note, *columns, "BLEU", "chrF", "lines as in the first")
    for folder, page in pages.items():
        runtime = size(folder / "runtime")
        sizes = (size(folder) - runtime) / 1e6, runtime / 1e6
        times = page.ready, page.first
        report.row(
            folder.name,
            *(f"{each:.1f}" for each in sizes),
            *(f"{each:.2f}" for each in times),
            f"{words / seconds[folder]:.0f}",
            *(f"{score:.2f}" for score in scores[folder]),
            f"{sum(map(str.__eq__, page.outputs, first.outputs)):,}",
        )


if __name__ == "__main__":
    main()
