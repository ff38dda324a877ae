"""The app before it is served: what programs may call, and what the page offers."""

import asyncio

import pytest

pytest.importorskip("gradio", reason="Gradio is not installed")

from vanilla_transformer.page import app as apps
from vanilla_transformer.page.page import Views
from vanilla_transformer.page.served_model import Wanted

# Gradio leaves sockets open, which would fail other tests of a process.
builds_an_app = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def slow(test):
    """Marks a test that builds an app."""
    for mark in builds_an_app:
        test = mark(test)
    return test


@pytest.fixture
def app(page):
    return apps.build_app(page)


def components(app, label):
    return [block for block in app.blocks.values() if getattr(block, "label", None) == label]


@slow
def test_programs_call_what_is_made_for_them(app):
    public = {
        str(function.api_name)
        for function in app.fns.values()
        if function.api_visibility == "public"
    }

    assert public == {"translate", "attention", "models", "translate_file"}


@slow
def test_files_wait_for_files_and_texts_for_texts(app):
    queues = {
        function.concurrency_id: function.concurrency_limit
        for function in app.fns.values()
        if function.concurrency_id in ("text", "file")
    }

    assert queues == {"text": 1, "file": 1}


@slow
def test_page_begins_with_the_search_of_its_model(app, model):
    (beam,) = components(app, "Beam")
    (penalty,) = components(app, "Length penalty")

    assert (beam.value, penalty.value) == (model.search.num_beams, model.search.length_penalty)


@slow
def test_choices_of_the_page_are_all_that_there_are(page, app):
    layout = apps._Layout(page)
    with apps.gr.Blocks():
        layout.build()

    assert layout.choices.keys() == set(Wanted.__dataclass_fields__)


def test_another_model_brings_its_examples_and_languages(page, model):
    page.models["two"].target_languages = ["de", "fr"]
    layout = apps._Layout(page)

    source, target, examples = layout._change_model("two")

    assert (source["visible"], target["visible"]) == (False, True)
    assert target["choices"] == ["de", "fr"]
    assert (examples["samples"], examples["visible"]) == ([], False)
    assert layout._change_model("one")[2]["samples"] == [["ja"], ["nein"]]


def test_nothing_changes_while_typing_is_not_followed(page):
    layout = apps._Layout(page)

    assert layout._translate_if(False, "ja", "one") == (apps.gr.skip(),) * len(Views._fields)


def test_error_names_a_file_as_its_reader_does():
    error = ValueError("'/tmp/gradio/af09/in.txt' must be UTF-8")

    assert apps._without_folder(error, "/tmp/gradio/af09/in.txt") == "'in.txt' must be UTF-8"


def test_each_answer_has_the_policy():
    sent = []

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.append(message)

    asyncio.run(apps.ContentPolicy(answer)({"type": "http"}, None, send))

    first, second = sent
    (own, policy) = first["headers"]
    assert (own, policy[0]) == ((b"a", b"b"), b"content-security-policy")
    assert policy[1].startswith(b"default-src 'self' data: blob:;")
    assert second == {"type": "http.response.body"}
