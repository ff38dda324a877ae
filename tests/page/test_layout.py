"""Parts of the app that need no server, and no app: those leave sockets open."""

import asyncio

import pytest

pytest.importorskip("gradio", reason="Gradio is not installed")

from vanilla_transformer_tools.page import app as apps


def only_here(pieces):
    return [piece for piece, category in pieces if category]


def test_what_only_one_text_has_is_marked():
    first, second = apps.mark_differences("the old man\nyes", "the man\nno\nso")

    assert only_here(first) == [" old", "yes"]
    assert only_here(second) == ["no\nso"]
    assert "".join(piece for piece, _ in second) == "the man\nno\nso"
    first, second = apps.mark_differences("GPU我喜欢狗", "GPU我喜欢猫")
    assert (only_here(first), only_here(second)) == (["狗"], ["猫"])


def test_table_and_tokens_have_all_numbers_line_by_line():
    best = {"text": "A", "score": -0.5, "reached_limit": False}
    second = {"text": "B", "score": -1.25, "reached_limit": True}
    line = {"source": "a", "translations": [best, second]}
    line |= {"tokens": ["a", "b"], "probabilities": [0.496, 0.04]}

    numbered = apps._with_words({"lines": [{"source": " "}, line]})

    assert apps._rows(numbered) == [["2", "1", "-0.500", "A"], ["2", "2", "-1.250", "B (cut off)"]]
    assert apps._tokens([line]) == [("a", "50%"), ("b", "4%"), ("\n", None)]
    linked = [("a\n", None), ("A", "a"), ("B ", None), ("\n", None)]
    assert apps._links([{"source": "a", "links": [("A", "a"), ("B", None)]}]) == linked


def test_guard_adds_the_policy_and_hides_headers():
    sent, seen = [], []

    async def answer(scope, receive, send):
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body"})

    async def send(message):
        sent.append(message)

    guard = apps.guarded(answer, "default-src 'self'", hidden=[b"x-claimed"])
    request = {"type": "http", "headers": [(b"x-claimed", b"evil.com"), (b"host", b"a")]}
    asyncio.run(guard(request, None, send))

    policy = (b"content-security-policy", b"default-src 'self'")
    assert sent[0]["headers"] == [(b"a", b"b"), policy]
    assert sent[1] == {"type": "http.response.body"}
    assert seen == [(b"host", b"a")]
