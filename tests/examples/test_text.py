"""Examples around a translator: HTML, placeholders, minimum Bayes risk, and the demo."""

import io
import os
import subprocess
import sys

import pytest

from vanilla_transformer_tools.translation import Translation

from ..support.documents import ROOT
from ..support.launching import free_port
from .test_scripts import names_of, run


class Shouting:
    """A translator that writes capitals."""

    def translate(self, lines):
        return (Translation(line.upper()) for line in lines)


def test_html_is_translated_text_by_text():
    page = (
        '<!DOCTYPE html>\n<html lang="de"><head><title>hallo</title><style>a {b: c}</style></head>'
        '<body><!-- nein --><p class="x y">\n  ein  <b>alter</b>\n  hund, 5 &lt; 6 &amp; mehr\n</p>'
        '<code>x = 1</code><p translate="no">bleibt <i>so</i></p><img alt="bild"> 12 \n'
        "</body></html>"
    )

    found = names_of("translate_html.py")["translate_html"](page, Shouting())

    # Parts between inline tags are texts of their own.
    expected = page.replace("hallo", "HALLO").replace("ein  <b>alter", "EIN  <b>ALTER")
    expected = expected.replace("hund, 5 &lt; 6 &amp; mehr", "HUND, 5 &lt; 6 &amp; MEHR")
    # Beautiful Soup ends the line of the document type.
    assert found.replace("/>", ">").replace("html>\n\n<html", "html>\n<html") == expected


MASKED = [
    ("%s von %1$s um %.2f", ["%s", "%1$s", "%.2f"]),
    ("{name}, {{n}} und ${x}", ["{name}", "{{n}}", "${x}"]),
    ("siehe https://a.de/b?c=d, oder a.b@c.org.", ["https://a.de/b?c=d", "a.b@c.org"]),
    ('ein <b class="x">hund</b>', ['<b class="x">', "</b>"]),
    ("100 % der 50%igen", []),
]


@pytest.mark.parametrize(("line", "found"), MASKED)
def test_placeholders_stay_whatever_the_model_does_with_symbols(line, found):
    example = names_of("mask_placeholders.py")

    def shout(texts, keep):
        return [text.upper().replace("<PH", "<ph" if keep else "") for text in texts]

    text, placeholders = example["mask"](line)
    kept, lost = (
        example["translate_masked"]([line], lambda texts, keep=keep: shout(texts, keep))[0]
        for keep in (True, False)
    )

    assert placeholders == found
    assert example["unmask"](text, found) == line
    expected = line.upper()
    for one in found:
        expected = expected.replace(one.upper(), one)
    assert kept == lost == expected
    repeated = example["translate_masked"]([line], lambda texts: [f"{one} <ph1>" for one in texts])
    assert all(one in repeated[0] for one in found)


def test_candidate_most_like_the_others_is_chosen():
    choose = names_of("mbr.py")["choose"]

    assert choose(["a cat", "a dog runs", "the dog runs", "a dog ran"]) == "a dog runs"
    assert choose(["zzz", "a dog", "zzz"]) == "zzz"


def test_scripts_translate_standard_input(place, monkeypatch):
    for name in ("mbr.py", "mask_placeholders.py"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("ein hund\n{x}\n"))
        options = ["--samples", 3] if name == "mbr.py" else []
        lines = run(name, "--model", place / "model", *options).splitlines()
        assert len(lines) == 2
    assert lines[1] == "{x}"


@pytest.mark.slow
def test_demo_translates_and_shows_attention(place):
    from gradio_client import Client

    port = str(free_port())
    (place / "model" / "README.md").write_text(
        "---\nwidget:\n- text: ein hund\n---\n\n# Model\n\n<!-- x -->\nA model of numbers.\n\nMore."
    )
    describe = names_of("demo.py")["describe"]
    assert describe(str(place / "model")) == ("A model of numbers.", ["ein hund"])
    assert describe(str(place)) == ("", [])
    environment = {"GRADIO_SERVER_PORT": port, "GRADIO_ANALYTICS_ENABLED": "False"}
    demo = subprocess.Popen(
        [sys.executable, "-u", ROOT / "examples" / "demo.py"],
        env={**os.environ, **environment, "MODEL": str(place / "model")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("Running on local URL" in line for line in demo.stdout)
        client = Client(f"http://127.0.0.1:{port}", verbose=False)

        table = client.predict("ein hund", 4, api_name="/translate")
        frame = client.predict("ein hund", api_name="/attention")

        assert table["headers"] == ["translation", "score"]
        scores = [score for _, score in table["data"]]
        assert len(scores) == 4
        assert scores == sorted(scores, reverse=True)
        assert frame.startswith("<iframe srcdoc=")
        assert "&quot;source&quot;" in frame
        with pytest.raises(Exception, match="Type one sentence of at most 1000 characters"):
            client.predict("  ", 1, api_name="/translate")
    finally:
        demo.terminate()
        demo.communicate()
