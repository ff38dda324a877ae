"""The page as a Gradio app: its components, the events between them, and its API."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from difflib import SequenceMatcher
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean
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

from vanilla_transformer_tools.page.page import LARGEST_FILE, Page
from vanilla_transformer_tools.page.served_model import WIDEST_BEAM, runs_from_right
from vanilla_transformer_tools.service.connections import (
    Connection,
    allowed_hosts,
    of_own_origin,
    report_failed_accepts_once,
)
from vanilla_transformer_tools.text.blanks import UNBLANKED

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
# Gradio leaves a field that shows a result without a name, and screen readers without its news.
_NAMES = """<script>new MutationObserver(() => {
  document.querySelector("#vt-output textarea")?.setAttribute("aria-label", "Translation");
  document.querySelector("#vt-status")?.setAttribute("role", "status");
}).observe(document, { childList: true, subtree: true });</script>"""
# One text at a time; a file has its own place, and gives way to texts between its parts.
_ONE_TEXT: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "text"}
_ONE_FILE: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "file"}
# Events of the page itself, which are no endpoints for programs.
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
_QUIET: dict[str, Any] = {**_ONE_TEXT, **_PRIVATE, "show_progress": "hidden"}

# Gradio looks for it among the defaults of a function.
_PROGRESS = gr.Progress()

_NOTHING = "Type or paste a text: a sentence, or several lines."
# Lines whose tokens and links are drawn, and characters by which a reader recognises a line.
_MOST_LINES = 20
_LABEL_LENGTH = 60
_SIDES = ("First model", "Second model")
_MARK, _PLAIN = "#c2410c", "#475569"
# Parts that a comparison marks: a character of a script without blanks, a word, or a mark.
_PART = re.compile(rf"[{UNBLANKED}]|[^\W{UNBLANKED}]+|\s+|.")

# Values of components, and pieces of text with the category in which they are marked.
Values = dict[Any, Any]
Marked = list[tuple[str, str | None]]


class _Layout:
    """Components and events of the app that is being built."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.models = list(page.models)
        # Components by the field of `Choices` that they set.
        self.choices: dict[str, Any] = {}
        self._add_texts()
        self._add_search()
        with gr.Tab("Translations"):
            self.hypotheses = gr.Dataframe(
                label="Score: log-probability / length^a; higher is better",
                headers=["line", "rank", "score", "translation"],
                column_widths=["10%", "10%", "15%", "65%"],
                **{"interactive": False, "wrap": True, "buttons": [], "elem_id": "vt-hypotheses"},
            )
        with gr.Tab("Probabilities"):
            self.tokens = gr.HighlightedText(
                label="Probability of each token after those before it; ␣ is a blank",
                color_map={f"{rate}%": _MARK if rate < 50 else _PLAIN for rate in range(101)},
                **{"buttons": [], "elem_id": "vt-tokens"},
            )
        with gr.Tab("Word links"):
            self.links = gr.HighlightedText(
                label="Words of each translation, with the source words that it attended to",
                **{"buttons": [], "elem_id": "vt-links"},
            )
        with gr.Tab("Attention") as self.attention_tab:
            self.line = gr.Dropdown([("1", 1)], value=1, label="Line")
            self.attention = gr.HTML(elem_id="vt-attention")
        if len(self.models) > 1:
            self._add_comparison()
        self._add_files()
        self._connect()

    def _add_texts(self) -> None:
        shape: dict[str, Any] = {"lines": 5, "max_lines": 14, "min_width": 280}
        with gr.Row(equal_height=True):
            self.text = gr.Textbox(label="Text", **shape)
            self.output = gr.Textbox(
                label="Translation", interactive=False, elem_id="vt-output", **shape
            )
        self.status = gr.HTML(elem_id="vt-status")
        *languages, examples = self._offers(self.models[0])
        with gr.Row(elem_id="vt-bar"):
            self.model = gr.Dropdown(self.models, label="Model", visible=len(self.models) > 1)
            for side, offer in zip(("source", "target"), languages, strict=True):
                label = f"{side.capitalize()} language"
                self.choices[f"{side}_language"] = gr.Dropdown(label=label, **offer)
            self.live = gr.Checkbox(True, label="Translate as I type", min_width=120)
            self.button = gr.Button("Translate", variant="primary", min_width=120)
        self.examples = gr.Dataset(
            label="Examples", components=[self.text], type="values", **examples
        )

    def _offers(self, name: str) -> list[dict[str, Any]]:
        """Languages of both sides and examples of a model, as properties of their components."""
        model, lines = self.page.model(name), self.page.examples[name]
        languages = [
            {"choices": sorted(known), "value": model.begins_with[side], "visible": bool(known)}
            for side, known in model.languages.items()
        ]
        return [*languages, {"samples": [[line] for line in lines], "visible": bool(lines)}]

    def _add_search(self) -> None:
        search = self.page.model("").search

        def add(**sliders: tuple[Any, ...]) -> None:
            for name, (least, most, value, step, label, info) in sliders.items():
                choice = gr.Slider(least, most, value, step=step, label=label, info=info)
                self.choices[name] = choice

        power, width = "Exponent a in log-probability / length^a", "The beam is at least as wide"
        with gr.Accordion("Search", open=False):
            with gr.Row():
                add(
                    num_beams=(1, WIDEST_BEAM, search.num_beams, 1, "Beam", None),
                    length_penalty=(-2, 3, search.length_penalty, 0.05, "Length penalty", power),
                    num_hypotheses=(1, WIDEST_BEAM, 1, 1, "Number of translations", width),
                )
            sentences = gr.Checkbox(True, label="Translate each sentence separately")
            sampled = gr.Checkbox(False, label="Sample at random instead of searching")
            self.choices |= {"split_sentences": sentences, "do_sample": sampled}
            with gr.Row(visible=False) as sampling:
                add(
                    temperature=(0.1, 2, 1, 0.05, "Temperature", "Below 1, likely tokens gain"),
                    top_k=(0, 100, 0, 1, "Top k", "0: all tokens"),
                    top_p=(0.05, 1, 1, 0.05, "Top p", "1: all tokens"),
                )
                self.choices["seed"] = gr.Number(0, label="Seed", precision=0)
        sampled.change(lambda on: gr.update(visible=on), sampled, sampling, **_QUIET)

    def _add_comparison(self) -> None:
        with gr.Tab("Compare"):
            with gr.Row():
                self.pair = [
                    gr.Dropdown(self.models, value=name, label=label)
                    for name, label in zip(self.models[:2], _SIDES, strict=True)
                ]
            compare = gr.Button("Compare models")
            with gr.Row():
                colors = {"color_map": {"only here": _MARK}, "show_inline_category": False}
                look = {"buttons": [], "min_width": 280, "elem_classes": "vt-compared"}
                self.compared = [
                    gr.HighlightedText(label=label, **colors, **look) for label in _SIDES
                ]
        asked = {self.text, *self.pair, *self.choices.values()}
        compare.click(self._compare, asked, self.compared, **_QUIET)

    def _add_files(self) -> None:
        with gr.Tab("File"):
            with gr.Row():
                self.file = gr.File(
                    label="UTF-8 text, plain or .gz, one sentence a line",
                    height=190,
                    elem_id="vt-file",
                )
                made = gr.File(label="Translated file", interactive=False, height=190)
            with gr.Row():
                start = gr.Button("Translate file", variant="primary")
                stop = gr.Button("Stop")
        asked = {self.file, self.model, *self.choices.values()}
        running = start.click(self._translate_file, asked, made, **_ONE_FILE, **_PRIVATE)
        stop.click(lambda: gr.Info("Stopped."), cancels=[running], **_PRIVATE)
        # For programs: the settings as one object, as in the other endpoints.
        gr.Button(visible=False).click(
            self._translate_file_for_program,
            [self.file, gr.Textbox(visible=False), gr.JSON(visible=False)],
            made,
            api_name="translate_file",
            **_ONE_FILE,
        )

    def _connect(self) -> None:
        asked = {self.text, self.model, self.live, *self.choices.values()}
        shown = [self.output, self.status, self.hypotheses, self.tokens, self.links]
        # Of several changes during a search, only the last is searched for.
        translation: dict[str, Any] = {
            "inputs": asked,
            "outputs": [*shown, self.attention, self.line],
            "trigger_mode": "always_last",
            **_QUIET,
        }
        chosen = [choice.input for choice in self.choices.values()]
        gr.on([self.button.click, *chosen], self._translate, **translation)
        # Its event `input` misses what is pasted and what is deleted.
        self.text.change(
            lambda values: self._translate(values) if values[self.live] else {}, **translation
        )
        self.examples.click(lambda line: line[0], self.examples, self.text, **_PRIVATE)
        gr.on(
            [self.attention_tab.select, self.line.input],
            self._attention,
            asked | {self.line},
            self.attention,
            **_QUIET,
        )
        languages = [self.choices["source_language"], self.choices["target_language"]]
        self.model.change(
            lambda name: [gr.update(**offer) for offer in self._offers(name)],
            self.model,
            [*languages, self.examples],
            **_PRIVATE,
        ).then(self._translate, **translation)

    def _settings(self, values: Values) -> dict[str, Any]:
        return {name: values[choice] for name, choice in self.choices.items()}

    def _translate(self, values: Values) -> Values:
        """Answer of the page to a text; a mistake of the reader becomes a message."""
        text, settings = values[self.text] or "", self._settings(values)
        shown: Values = {
            **dict.fromkeys((self.output, self.attention), ""),
            **{place: [] for place in (self.hypotheses, self.tokens, self.links)},
            self.line: gr.update(choices=[("1", 1)], value=1),
        }
        try:
            if not text.strip():
                raise ValueError(_NOTHING)
            answer = self.page.translate(text, values[self.model], settings)
        except ValueError as error:
            return shown | {self.status: _message(str(error))}
        numbered = _with_words(answer)
        status = f"<p>{escape(answer['search'])}</p>"
        if any(line["translations"][0]["reached_limit"] for line in numbered.values()):
            status += _message("A translation was cut off at the length limit.")
        if len(numbered) > _MOST_LINES:
            status += _message(f"Tokens and links are shown for the first {_MOST_LINES} lines.")
        lines = list(numbered.values())[:_MOST_LINES]
        names = [
            (f"{number}: {line['source'][:_LABEL_LENGTH]}", number)
            for number, line in numbered.items()
        ]
        is_from_right = runs_from_right(answer["text"])
        return shown | {
            self.output: answer["text"],
            self.status: status,
            self.hypotheses: _rows(numbered),
            self.tokens: gr.update(value=_tokens(lines), rtl=is_from_right),
            self.links: gr.update(value=_links(lines), rtl=is_from_right),
            self.line: gr.update(choices=names, value=names[0][1]),
        }

    def _attention(self, values: Values) -> str:
        asked = values[self.text] or "", values[self.model], values[self.line] or 1
        try:
            page = self.page.attention(*asked, self._settings(values))
        except ValueError as error:
            return _message(str(error))
        # In a frame that may run its own script and reach nothing else.
        return (
            '<iframe class="vt-frame" title="Attention of the model, layer by layer" '
            f'sandbox="allow-scripts" srcdoc="{escape(page)}"></iframe>'
        )

    def _compare(self, values: Values) -> list[Any]:
        text, settings = values[self.text] or "", self._settings(values)
        names = [values[choice] for choice in self.pair]
        with _as_gradio_errors():
            if not text.strip():
                raise ValueError(_NOTHING)
            # A model without languages takes none of those that are chosen for the other one.
            foreign = [
                {side: None for side, known in self.page.model(name).languages.items() if not known}
                for name in names
            ]
            answers = [
                self.page.translate(text, name, settings | without)
                for name, without in zip(names, foreign, strict=True)
            ]
        columns = mark_differences(*(answer["text"] for answer in answers))
        updates = []
        for name, answer, column in zip(names, answers, columns, strict=True):
            best = [line["translations"][0] for line in _with_words(answer).values()]
            score = fmean(each["score"] or 0 for each in best)
            label = f"{name}: score {score:.3f}, {answer['search']}"
            is_from_right = runs_from_right(answer["text"])
            updates.append(gr.update(value=column, label=label, rtl=is_from_right))
        return updates

    def _translate_file(self, values: Values, progress: gr.Progress = _PROGRESS) -> Iterator[Any]:
        with _as_gradio_errors():
            if values[self.file] is None:
                raise ValueError("Choose a file first.")
            for done, count, made in self.page.translate_file(
                Path(values[self.file]), values[self.model], self._settings(values)
            ):
                progress((done, count), unit="lines")
                yield made and str(made)

    def _translate_file_for_program(
        self, file: str, model: str, settings: dict[str, Any] | None = None
    ) -> str:
        """Translate a text file line by line; the result has the same number of lines."""
        with _as_gradio_errors():
            *_, (_, _, made) = self.page.translate_file(Path(file), model, settings or {})
        return str(made)


def _message(words: str) -> str:
    """A sentence in place of a result."""
    return f'<p class="vt-message">{escape(words)}</p>'


def _with_words(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The lines of an answer that are not blank, by number."""
    numbered = enumerate(answer["lines"], start=1)
    return {number: line for number, line in numbered if line["source"].strip()}


def _rows(numbered: dict[int, dict[str, Any]]) -> list[list[str]]:
    """All translations of all lines with their scores, best first."""
    return [
        [str(number), str(rank), f"{one['score'] or 0:.3f}", one["text"] + cut]
        for number, line in numbered.items()
        for rank, one in enumerate(line["translations"], start=1)
        for cut in [" (cut off)" * one["reached_limit"]]
    ]


def _tokens(lines: Sequence[dict[str, Any]]) -> Marked:
    """The tokens of translations, each with its probability."""
    marked: Marked = []
    for line in lines:
        rates = [f"{probability:.0%}" for probability in line["probabilities"]]
        marked += [*zip(line["tokens"], rates, strict=True), ("\n", None)]
    return marked


def _links(lines: Sequence[dict[str, Any]]) -> Marked:
    """Lines, and the words of their translations, each with the words that it is linked to."""
    marked: Marked = []
    for line in lines:
        words = [(word, linked) if linked else (f"{word} ", None) for word, linked in line["links"]]
        marked += [(line["source"] + "\n", None), *words, ("\n", None)]
    return marked


def mark_differences(first: str, second: str) -> tuple[Marked, Marked]:
    """Two texts in pieces, of which those that the other text lacks are marked."""
    columns: tuple[Marked, Marked] = [], []
    parts = [_PART.findall(text) for text in (first, second)]
    matcher = SequenceMatcher(None, parts[0], parts[1], autojunk=False)
    for tag, *ends in matcher.get_opcodes():
        for side, column in enumerate(columns):
            if piece := "".join(parts[side][ends[2 * side] : ends[2 * side + 1]]):
                column.append((piece, None if tag == "equal" else "only here"))
    return columns


@contextmanager
def _as_gradio_errors() -> Iterator[None]:
    """Sends the message of a reader's mistake; Gradio hides the messages of other errors."""
    try:
        yield
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error


def build_app(page: Page) -> gr.Blocks:
    """The Gradio app of a page; `launch` starts it."""
    title = " · ".join(page.models)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=_FILE_TIMES) as app:
        gr.HTML(
            f"<h1>{escape(title)}</h1><p>Translate with a vanilla Transformer, and see what it "
            "considered.</p>",
            elem_id="vt-title",
        )
        _Layout(page)
        # For `gradio_client`, and for programs that speak HTTP.
        for name, function in (
            ("translate", page.translate),
            ("attention", page.attention),
            ("models", page.names),
        ):
            gr.api(_as_gradio_errors()(function), api_name=name, **_ONE_TEXT)
    return app


def guarded(app: ASGIApp, policy: str, hidden: Collection[bytes] = ()) -> ASGIApp:
    """An app that tells browsers to ask no other host.

    Args:
        app: ASGI app that answers.
        policy: Content-Security-Policy of each answer.
        hidden: Names of the headers of requests that the app does not get, such as those by which
            clients claim an address for the page.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                field = (b"content-security-policy", policy.encode())
                message["headers"] = [*message["headers"], field]
            await send(message)

        kept = [field for field in scope.get("headers", ()) if field[0] not in hidden]
        await app({**scope, "headers": kept}, receive, send_with_policy)

    return answer


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
        page: Page to serve.
        host: Address to listen on; None: the loopback address, or in a Space the one it needs.
        port: Port to listen on; None: the first free one from 7860.
        share: Whether to ask Gradio for a public address, through which others reach the page.
        hosts: Hosts that requests may name, in addition to `allowed_hosts`.

    Returns:
        The app, which serves until it is closed, and its address.

    Raises:
        ValueError: If one of the hosts is no name of a host.
    """
    # Others choose the host of the requests there.
    is_space = get_space() is not None
    is_behind_a_proxy = share or is_space
    allowed = allowed_hosts(host or "127.0.0.1", hosts)

    @asynccontextmanager
    async def lifespan(server: Any) -> AsyncIterator[None]:
        report_failed_accepts_once(asyncio.get_running_loop())
        # Around Gradio's own middleware, which answers some requests itself.
        stack = server.middleware_stack
        if not is_behind_a_proxy:
            stack = TrustedHostMiddleware(of_own_origin(stack), allowed, False)
        policy = _CONTENT_POLICY + _FRAMES_OF_SPACES * is_space
        hidden = () if is_behind_a_proxy else _CLAIMED_ADDRESSES
        server.middleware_stack = guarded(stack, policy, hidden)
        yield

    app = build_app(page)
    _, local, public = app.launch(
        server_name=host,
        server_port=port,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=["api", "settings"],
        max_file_size=LARGEST_FILE,
        theme=gr.themes.Default(primary_hue="blue", font=["sans-serif"], font_mono=["monospace"]),
        css=files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        head=_NAMES,
        app_kwargs={"lifespan": lifespan},
    )
    # Connections are made with it from now on.
    app.server.config.http_protocol_class = Connection
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return app, public or local
