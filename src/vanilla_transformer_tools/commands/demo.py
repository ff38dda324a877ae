"""The `demo` command: a page in the browser for saved models."""

import signal
import threading
from contextlib import suppress

from vanilla_transformer_tools.commands.command import (
    bind,
    build_parser,
    check_model,
    end_at_once,
    interrupt,
    parse,
)
from vanilla_transformer_tools.settings import DemoSettings

_EXAMPLE = """The page needs the extra demo, and no network.
Ctrl-C and SIGTERM close it, and end with status 0.

example:
  vanilla-transformer demo --model runs/de-en
  vanilla-transformer demo --model runs/de-en user/de-en --port 8080
"""


def demo(argv: list[str]) -> None:
    """Open a page to try models in the browser."""
    parser = build_parser(demo, DemoSettings, _EXAMPLE)
    settings = DemoSettings(**parse(parser, argv))
    check_model(parser, settings.model)
    if settings.port is not None and not 0 < settings.port < 2**16:
        parser.error(f"--port must be from 1 to {2**16 - 1}, got {settings.port}")
    # SIGINT too: jobs that a script starts in the background ignore it, unless told otherwise.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    # Before the model is loaded. Gradio would try a hundred ports of a wrong host, and takes the
    # brackets of IPv6.
    bind(settings.host.strip("[]"), settings.port or 0).close()
    from vanilla_transformer_tools.page.app import launch
    from vanilla_transformer_tools.page.page import Page

    page = Page.load(
        settings.model or [],
        examples=settings.examples,
        source_language=settings.source_language,
        target_language=settings.target_language,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    app, address = launch(
        page,
        host=settings.host,
        port=settings.port,
        share=settings.share,
        hosts=settings.allowed_hosts,
    )
    with suppress(KeyboardInterrupt):
        print(f"The page is at {address}", flush=True)
        _wait()
    # Gradio gives readers who wait some seconds; a second Ctrl-C does not.
    signal.signal(signal.SIGINT, lambda signum, _: end_at_once(signum))
    app.close(verbose=False)


def _wait() -> None:
    """Waits for a signal. Gradio's own function would then wait for browsers to close the page."""
    threading.Event().wait()
