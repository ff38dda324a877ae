"""The page as a Gradio app: its components, the events between them, and its API."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

# Before Gradio reads it: nothing is reported to anybody.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

try:
    import gradio as gr
    from gradio.utils import get_space
except ImportError as error:
    raise ImportError("The page needs Gradio. Install it: pip install -e '.[demo]'") from error

from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vanilla_transformer_tools.page import fragments
from vanilla_transformer_tools.page.page import LARGEST_FILE, Page, Views
from vanilla_transformer_tools.page.served_model import WIDEST_BEAM
from vanilla_transformer_tools.service.callers import OwnOrigin, allowed_hosts
from vanilla_transformer_tools.service.connections import Connection, report_failed_accepts_once

# Seconds between two deletions of readers' files, and the age of those that are deleted.
_FILE_TIMES = (600, 3600)
# The browser may ask this page for something, and nobody else. Gradio needs inline scripts.
_CONTENT_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'self'"
)
# The Hub shows a Space in a frame.
_FRAMES_OF_SPACES = " https://huggingface.co"
# Gradio takes its own address from them; in a Space and with --share its proxies set them.
_CLAIMED_ADDRESSES = (b"x-forwarded-host", b"x-gradio-server")
# One text at a time; a file has its own place, and gives way to texts between its parts.
_TEXT = {"concurrency_limit": 1, "concurrency_id": "text", "show_progress": "hidden"}
_PRIVATE = {"api_visibility": "private"}


class ContentPolicy:
    """Tells the browser of each answer to ask no other host.

    Args:
        app: The ASGI app that answers.
        policy: What the browser is told.
    """

    def __init__(self, app: ASGIApp, policy: str = _CONTENT_POLICY) -> None:
        self.app = app
        self.policy = (b"content-security-policy", policy.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def send_with_policy(answer: Message) -> None:
            if answer["type"] == "http.response.start":
                answer["headers"] = [*answer["headers"], self.policy]
            await send(answer)

        await self.app(scope, receive, send_with_policy if scope["type"] == "http" else send)


class OwnAddress:
    """Hides the addresses that a client claims the page to have.

    Args:
        app: The ASGI app that answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "http":
            kept = [field for field in scope["headers"] if field[0] not in _CLAIMED_ADDRESSES]
            scope = {**scope, "headers": kept}
        await self.app(scope, receive, send)


def build_app(page: Page) -> gr.Blocks:
    """The Gradio app of a page; `launch` starts it."""
    title = " · ".join(page.models)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=_FILE_TIMES) as app:
        gr.HTML(
            f"<h1>{fragments.text(title)}</h1><p>Translate with a vanilla Transformer, and see "
            "what it considered.</p>",
            elem_id="vt-title",
        )
        _Layout(page).build()
        _add_api(page)
    return app


class _Layout:
    """Components and events.

    Args:
        page: What they show.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.models = list(page.models)
        self.choices: dict[str, gr.components.Component] = {}

    def build(self) -> None:
        """Adds everything to the app that is being built."""
        with gr.Row(equal_height=True):
            sizes = {"lines": 5, "max_lines": 14, "min_width": 280}
            self.text = gr.Textbox(label="Text", **sizes)
            self.output = gr.Textbox(
                label="Translation", interactive=False, buttons=["copy"], **sizes
            )
        self.status = gr.HTML(elem_id="vt-status")
        with gr.Row(elem_classes="vt-bar"):
            self.model = gr.Dropdown(
                self.models, value=self.models[0], label="Model", visible=len(self.models) > 1
            )
            self._add_languages()
            self.live = gr.Checkbox(True, label="Translate as I type", min_width=120)
            self.button = gr.Button("Translate", variant="primary", min_width=120)
        self.examples = gr.Dataset(
            label="Examples",
            components=[self.text],
            samples=[[line] for line in self.page.examples[self.models[0]]],
            type="values",
            visible=bool(self.page.examples[self.models[0]]),
        )
        self._add_search()
        with gr.Tab("Translations"):
            self.hypotheses = gr.HTML(elem_id="vt-hypotheses")
        with gr.Tab("Probabilities"):
            self.tokens = gr.HTML(elem_id="vt-tokens")
        with gr.Tab("Word links"):
            self.links = gr.HTML(elem_id="vt-links")
        self._add_attention()
        if len(self.models) > 1:
            self._add_comparison()
        self._add_files()
        self._connect()

    def _add_languages(self) -> None:
        for side in ("source", "target"):
            self.choices[f"{side}_language"] = gr.Dropdown(
                label=f"{side.capitalize()} language",
                **self._languages(self.models[0])[side],
            )

    def _languages(self, name: str) -> dict[str, dict[str, Any]]:
        """What the choice of a language offers for a model, by side."""
        model = self.page.model(name)
        sides = {
            "source": (model.source_languages, model.source_language),
            "target": (model.target_languages, model.target_language),
        }
        return {
            side: {"choices": sorted(known), "value": default, "visible": bool(known)}
            for side, (known, default) in sides.items()
        }

    def _add_search(self) -> None:
        search = self.page.model(None).search
        add = self.choices.__setitem__
        with gr.Accordion("Search", open=False):
            with gr.Row():
                add("num_beams", _whole("Beam", search.num_beams, 1, WIDEST_BEAM))
                add(
                    "length_penalty",
                    gr.Slider(
                        -2,
                        3,
                        search.length_penalty,
                        step=0.05,
                        label="Length penalty",
                        info="Exponent a in log-probability / length^a",
                    ),
                )
                add(
                    "num_hypotheses",
                    _whole(
                        "Number of translations",
                        1,
                        1,
                        WIDEST_BEAM,
                        info="The beam is at least as wide",
                    ),
                )
            add("split_sentences", gr.Checkbox(True, label="Translate each sentence alone"))
            add("do_sample", gr.Checkbox(False, label="Sample at random instead of searching"))
            with gr.Row(visible=False) as self.sampling:
                add(
                    "temperature",
                    gr.Slider(
                        0.1,
                        2,
                        1,
                        step=0.05,
                        label="Temperature",
                        info="Below 1, likely tokens get likelier",
                    ),
                )
                add("top_k", _whole("Top k", 0, 0, 100, info="0: all tokens"))
                add("top_p", gr.Slider(0.05, 1, 1, step=0.05, label="Top p", info="1: all tokens"))
                add("seed", gr.Number(0, label="Seed", precision=0))

    def _add_attention(self) -> None:
        with gr.Tab("Attention") as self.attention_tab:
            with gr.Row(elem_classes="vt-bar"):
                self.line = gr.Dropdown([("1", 1)], value=1, label="Line", scale=4)
                self.show = gr.Button("Show attention", min_width=120)
            self.attention = gr.HTML(elem_id="vt-attention")

    def _add_comparison(self) -> None:
        with gr.Tab("Compare"):
            with gr.Row(elem_classes="vt-bar"):
                self.pair = [
                    gr.Dropdown(self.models, value=self.models[place], label=label)
                    for place, label in enumerate(("First model", "Second model"))
                ]
                compare = gr.Button("Compare models", min_width=120)
            compared = gr.HTML(elem_id="vt-compared")
        compare.click(
            self._compare,
            [self.text, *self.pair, *self.choices.values()],
            compared,
            **_TEXT,
            **_PRIVATE,
        )

    def _add_files(self) -> None:
        with gr.Tab("File"):
            gr.HTML(
                '<p class="vt-note">A text file in UTF-8, plain or .gz, one sentence a line. '
                "The result has the same number of lines.</p>"
            )
            with gr.Row():
                given = gr.File(label="File to translate", height=190)
                made = gr.File(label="Translated file", interactive=False, height=190)
            with gr.Row():
                start = gr.Button("Translate file", variant="primary")
                stop = gr.Button("Stop")
            progress = gr.HTML(elem_id="vt-progress")
        running = start.click(
            self._translate_file,
            [given, self.model, *self.choices.values()],
            [progress, made],
            concurrency_limit=1,
            concurrency_id="file",
            show_progress="hidden",
            **_PRIVATE,
        )
        # For programs: the settings as one object, as in the other endpoints.
        gr.Button(visible=False).click(
            self._translate_file_for_program,
            [given, gr.Textbox(visible=False), gr.JSON(visible=False)],
            made,
            api_name="translate_file",
            concurrency_limit=1,
            concurrency_id="file",
        )
        stopped = fragments.message("Stopped.")
        stop.click(lambda: stopped, None, progress, cancels=[running], **_PRIVATE)

    def _connect(self) -> None:
        asked = [self.text, self.model, *self.choices.values()]
        shown = [
            self.output,
            self.status,
            self.hypotheses,
            self.tokens,
            self.links,
            self.attention,
            self.line,
        ]
        translation = {"inputs": asked, "outputs": shown, **_TEXT, **_PRIVATE}
        # Of several changes during a search, only the last is searched for.
        latest = {**translation, "trigger_mode": "always_last"}
        gr.on([self.button.click], self._translate, **translation)
        # Its event `input` misses what is pasted and what is deleted.
        self.text.change(
            self._translate_if,
            [self.live, *asked],
            shown,
            **{**_TEXT, **_PRIVATE},
            trigger_mode="always_last",
        )
        changed = [choice.input for choice in self.choices.values()]
        gr.on(changed, self._translate, **latest)
        asked = [self.text, self.model, self.line, *self.choices.values()]
        for event in (self.show.click, self.attention_tab.select, self.line.input):
            event(self._attention, asked, self.attention, **_TEXT, **_PRIVATE)
        self._connect_offers(translation)

    def _connect_offers(self, translation: dict[str, Any]) -> None:
        """Examples that are chosen, and what depends on the model and on sampling."""
        self.examples.click(lambda line: line[0], self.examples, self.text, **_PRIVATE).then(
            self._translate, **translation
        )
        languages = [self.choices["source_language"], self.choices["target_language"]]
        self.model.change(
            self._change_model, self.model, [*languages, self.examples], **_PRIVATE
        ).then(self._translate, **translation)
        self.choices["do_sample"].change(
            lambda chosen: gr.update(visible=chosen),
            self.choices["do_sample"],
            self.sampling,
            show_progress="hidden",
            **_PRIVATE,
        )

    def _named(self, values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self.choices, values, strict=True))

    def _translate(self, text: str, model: str, *values: Any) -> tuple[Any, ...]:
        views = self.page.view(text or "", model, self._named(values))
        lines = views.lines or [("1", 1)]
        return (*views[:-1], gr.update(choices=lines, value=lines[0][1]))

    def _translate_if(self, live: bool, *asked: Any) -> tuple[Any, ...]:
        return self._translate(*asked) if live else (gr.skip(),) * len(Views._fields)

    def _attention(self, text: str, model: str, line: int, *values: Any) -> str:
        try:
            return fragments.attention_frame(
                self.page.attention(text or "", model, line or 1, self._named(values))
            )
        except ValueError as error:
            return fragments.message(str(error))

    def _compare(self, text: str, first: str, second: str, *values: Any) -> str:
        try:
            return self.page.compare(text or "", (first, second), self._named(values))
        except ValueError as error:
            return fragments.message(str(error))

    def _translate_file(self, path: str | None, model: str, *values: Any) -> Iterator[Any]:
        if path is None:
            yield fragments.message("Choose a file first."), None
            return
        try:
            for done, lines, made in self.page.translate_file(
                Path(path), model, self._named(values)
            ):
                yield fragments.progress(done, lines), made and str(made)
        except ValueError as error:
            yield fragments.message(_without_folder(error, path)), None

    def _translate_file_for_program(
        self, file: str, model: str, settings: dict[str, Any] | None = None
    ) -> str:
        """Translate a text file line by line; the result has the same number of lines."""
        with _as_gradio_errors():
            try:
                *_, (_, _, made) = self.page.translate_file(Path(file), model, settings or {})
            except ValueError as error:
                raise ValueError(_without_folder(error, file)) from error
        return str(made)

    def _change_model(self, name: str) -> tuple[Any, ...]:
        languages = self._languages(name)
        samples = [[line] for line in self.page.examples[name]]
        return (
            gr.update(**languages["source"]),
            gr.update(**languages["target"]),
            gr.update(samples=samples, visible=bool(samples)),
        )


def _whole(label: str, value: int, least: int, most: int, info: str | None = None) -> gr.Slider:
    return gr.Slider(least, most, value, step=1, precision=0, label=label, info=info)


def _add_api(page: Page) -> None:
    """Endpoints for `gradio_client`, and for programs that speak HTTP."""

    def translate(text: str, model: str = "", settings: dict[str, Any] | None = None) -> dict:  # type: ignore[type-arg]
        """Translate lines: all translations with scores, and the probability of each token."""
        with _as_gradio_errors():
            return page.translate(text, model, settings or {})

    def attention(
        text: str, model: str = "", line: int = 1, settings: dict[str, Any] | None = None
    ) -> str:
        """The attention of a model while it translates a line, as an HTML page."""
        with _as_gradio_errors():
            return page.attention(text, model, line, settings or {})

    def models() -> list[str]:
        """Names of the models."""
        return list(page.models)

    for function in (translate, attention, models):
        gr.api(function, api_name=function.__name__, concurrency_limit=1, concurrency_id="text")


@contextmanager
def _as_gradio_errors() -> Iterator[None]:
    """Sends the message of a reader's mistake; Gradio hides those of other errors."""
    try:
        yield
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error


def _without_folder(error: ValueError, path: str) -> str:
    """A message that names a file as its reader knows it."""
    return str(error).replace(path, Path(path).name)


def launch(
    page: Page,
    *,
    host: str | None = None,
    port: int | None = None,
    share: bool = False,
    hosts: Sequence[str] = (),
) -> tuple[gr.Blocks, str]:
    """Starts serving a page.

    Args:
        page: What it serves.
        host: Address to listen on; None: the loopback address, or in a Space the one it needs.
        port: None: the first free one from 7860.
        share: Whether to ask Gradio for a public address, through which others reach the page.
        hosts: Hosts that requests may name, besides those of `allowed_hosts`.

    Returns:
        The app, which serves until it is closed, and its address.

    Raises:
        ValueError: If one of the hosts is no name of a host.
    """
    # Others choose the host of the requests there.
    is_space = get_space() is not None
    is_behind_a_proxy = share or is_space
    named = allowed_hosts(host or "127.0.0.1", hosts)

    @asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[None]:
        report_failed_accepts_once(asyncio.get_running_loop())
        # Around Gradio's own middleware, which answers some requests itself.
        guarded = server.middleware_stack
        if not is_behind_a_proxy:
            guarded = TrustedHostMiddleware(OwnOrigin(OwnAddress(guarded)), named, False)
        policy = _CONTENT_POLICY + _FRAMES_OF_SPACES * is_space
        server.middleware_stack = ContentPolicy(guarded, policy)
        yield

    folder = files("vanilla_transformer_tools.page")
    app = build_app(page)
    _, local, public = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        quiet=True,
        inbrowser=False,
        prevent_thread_lock=True,
        show_error=False,
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=["api", "settings"],
        max_file_size=LARGEST_FILE,
        theme=gr.themes.Soft(primary_hue="blue", font=["sans-serif"], font_mono=["monospace"]),
        css=folder.joinpath("page.css").read_text(encoding="utf-8"),
        head=f"<script>{folder.joinpath('page.js').read_text(encoding='utf-8')}</script>",
        app_kwargs={"lifespan": lifespan},
    )
    # Connections are made with it from now on.
    app.server.config.http_protocol_class = Connection
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return app, public or local
