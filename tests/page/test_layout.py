"""Parts of the app that need no server, and no app: those leave sockets open."""

import asyncio

import pytest

pytest.importorskip("gradio", reason="Gradio is not installed")

from vanilla_transformer_tools.page import app as apps
from vanilla_transformer_tools.page.page import Views


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
