"""The page of `examples/web`: it computes in the browser what ONNX Runtime computes in Python."""

import functools
import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer

from number_words import german
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.exports.export import export_model
from vanilla_transformer_tools.exports.onnx import OnnxModel

from ..models import build_variant
from ..support.browser import open_browser
from ..support.documents import ROOT, code_blocks

BUILD = ROOT / "examples" / "web" / "build.sh"
LINES = [german(number) for number in range(90, 190)]
# The random model seldom ends by itself.
EXTRA = 4


def build(export, page, path=os.environ["PATH"]):
    command = ["bash", str(BUILD), str(export), str(page)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of one model in float32, and in int8; skips the tests where npm has no packages."""
    folder = tmp_path_factory.mktemp("pages")
    tokenizer = VanillaTransformerTokenizer.train(LINES, vocab_size=310, kind="char")
    # Heads that no class of Transformers has: what counts is in the graphs.
    sizes = {"talking_heads": "both", "encoder_layers": 1, "decoder_layers": 1}
    for one in (build_variant(vocab_size=len(tokenizer), **sizes), tokenizer):
        one.save_pretrained(folder / "model")
    settings = {"max_length": 40, "language": ["de", "en"], "license": "mit"}
    (folder / "model" / "run.json").write_text(json.dumps({"settings": settings}))
    for kind in ("float32", "int8"):
        export = folder / f"export-{kind}"
        export_model(str(folder / "model"), export, "onnx", sample=LINES[:9])
        if kind == "int8":
            (code,) = (
                one for one in code_blocks("docs/import_export.md", "python") if "QUInt8" in one
            )
            exec(code.replace("runs/de-en-onnx", str(export)))
        done = build(export, folder / kind)
        if "npm cannot download" in done.stderr or "npm is not installed" in done.stderr:
            pytest.skip(done.stderr)
        assert done.returncode == 0, done.stderr
        script = folder / kind / "page.js"
        text = script.read_text("utf-8")
        assert "EXTRA_TOKENS = 50;" in text
        script.write_text(text.replace("EXTRA_TOKENS = 50;", f"EXTRA_TOKENS = {EXTRA};"), "utf-8")
    return folder


@contextmanager
def served(folder):
    """Address of a static server of a folder."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Reader:
    """Types into the page, and reads what it says."""

    def __init__(self, browser, address):
        self.browser = browser
        browser.get(address)
        self.wait("Ready", 30)

    def status(self):
        return self.browser.find_element("id", "status").text

    def wait(self, beginning, seconds):
        end = time.monotonic() + seconds
        while not self.status().startswith(beginning):
            assert time.monotonic() < end, self.status()
            time.sleep(0.05)

    def type(self, text, expected="Done", seconds=60):
        self.browser.execute_script(
            "document.getElementById('status').textContent = '';"
            "const source = document.getElementById('source');"
            "source.value = JSON.parse(arguments[0]);"
            "source.dispatchEvent(new Event('input'));",
            # The driver takes no lone surrogate.
            json.dumps(text),
        )
        self.wait(expected, seconds)
        return self.browser.execute_script(
            "return [...document.querySelectorAll('#translations li')].map(one => one.textContent)"
        )

    def hosts(self):
        messages = [
            json.loads(one["message"])["message"] for one in self.browser.get_log("performance")
        ]
        urls = [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        ]
        return {url.split("/")[2].split(":")[0] for url in urls if url.startswith("http")}


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_browser_translates_as_onnxruntime_does_and_asks_no_other_host(pages, kind):
    tokenizer = AutoTokenizer.from_pretrained(pages / kind / "model")
    ids = tokenizer(LINES)["input_ids"]
    outputs = OnnxModel(pages / "export-float32").translate(ids, [len(row) + EXTRA for row in ids])
    expected = tokenizer.batch_decode([one.tokens for one in outputs], skip_special_tokens=True)
    names = {file.name for file in (pages / kind).iterdir()}
    assert names == {"index.html", "page.css", "page.js", "model", "runtime"}

    with served(pages / kind) as address, open_browser() as browser:
        reader = Reader(browser, address)
        assert browser.find_element("id", "facts").text == "de → en\nLicence: mit"
        halves = [reader.type("\n".join(part)) for part in (LINES[:50], LINES[50:])]
        found = [*halves[0], *halves[1]]
        assert all(found)
        assert len(found) == len(LINES)
        if kind == "float32":
            assert found == expected

        assert reader.type("", "Type some text") == []
        assert reader.type("x" * 20_000, "A text has at most 5000 characters") == []
        odd = reader.type("😀👍🏽\n\n\u0000\u0007\u200b\ud800\n你好")
        assert [bool(one) for one in odd] == [True, False, True, True]
        assert reader.type("zwei " * 60)[0].startswith("A line has at most 40 tokens, got ")
        assert reader.hosts() == {"127.0.0.1"}
        console = [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
        assert console == []


def test_page_is_built_of_an_export_or_not_at_all(tmp_path):
    other, export, tools = (tmp_path / name for name in ("other", "export", "tools"))
    for folder in (other, export / "onnx", tools):
        folder.mkdir(parents=True)
    (export / "onnx/encoder_model.onnx").touch()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name))

    def fault(export, page="page", path=os.environ["PATH"]):
        done = build(export, tmp_path / page, path)
        assert done.returncode == 2
        assert sorted(one.name for one in tmp_path.iterdir()) == ["export", "other", "tools"]
        return done.stderr

    assert "must be a folder of 'vanilla-transformer export --format onnx'" in fault(other)
    assert "exists already; give another folder" in fault(export, "other")
    assert "npm is not installed; it comes with Node.js" in fault(export, path=str(tools))
    (tools / "npm").write_text("#!/bin/sh\nexit 1\n")
    (tools / "npm").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    assert "got none: tokenizer.json.\nbuild.sh: the tokenizer of" in fault(export, path=path)
    VanillaTransformerTokenizer.train(LINES, vocab_size=310, kind="char").save_pretrained(export)
    assert "npm cannot download @huggingface/transformers@" in fault(export, path=path)
    (tools / "npm").write_text("#!/bin/sh\nmkdir package && tar -czf x.tgz package && echo x.tgz\n")
    assert "another file than the pinned release" in fault(export, path=path)
