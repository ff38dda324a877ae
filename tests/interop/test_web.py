"""The page: it computes in the browser what ONNX Runtime computes in Python."""

import json
import os
import shutil
import stat
import time

import numpy as np
import pytest
from transformers import AutoTokenizer

from number_words import german
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.interop import web
from vanilla_transformer_tools.interop.export import export_model
from vanilla_transformer_tools.interop.onnx import OnnxModel, quantize_onnx, save_interface
from vanilla_transformer_tools.saved_folder import load_model
from web import served

from ..models import build_variant
from ..support.browser import open_browser
from ..support.documents import ROOT
from ..support.scripts import run_script

LINES = [german(number) for number in range(90, 190)]
# The random model seldom ends by itself.
EXTRA = 4


def save_model(folder, kind="char", **changes):
    tokenizer = VanillaTransformerTokenizer.train(LINES, vocab_size=310, kind=kind)
    model = build_variant(vocab_size=len(tokenizer), **changes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "run.json").write_text(
        json.dumps({"settings": {"max_length": 40, "language": ["de", "en"], "license": "mit"}})
    )
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of one model in float32, and in int8; skips the tests where npm has no runtime."""
    folder = tmp_path_factory.mktemp("pages")
    try:
        web.runtime(tmp_path_factory.mktemp("unused"))
    except OSError as error:
        pytest.skip(str(error))
    # Heads that no class of Transformers has: what counts is in the graphs.
    source = save_model(folder / "model", talking_heads="both", encoder_layers=1, decoder_layers=1)
    export_model(str(source), folder / "float32", "web", quantization="float32", sample=LINES[:9])
    facts = folder / "float32" / "page.json"
    content = json.loads(facts.read_text("utf-8"))
    assert content["extraTokens"] == 50
    facts.write_text(json.dumps(content | {"extraTokens": EXTRA}), "utf-8")
    shutil.copytree(folder / "float32", folder / "int8")
    quantize_onnx(folder / "int8" / "model")
    save_interface(load_model(str(source)), folder / "int8" / "model", "int8")
    return folder


def greedy(folder):
    """Ids of greedy translations by ONNX Runtime, without the start token."""
    model, tokenizer = OnnxModel(folder), AutoTokenizer.from_pretrained(folder)
    config = model.generation_config
    found = []
    for ids in tokenizer(LINES)["input_ids"]:
        source = {"attention_mask": np.ones((1, len(ids)), np.int64)}
        (encoded,) = model.encoder.run(None, {"input_ids": np.array([ids]), **source})
        source = {"encoder_attention_mask": source["attention_mask"]}
        past = {
            node.name: np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32)
            for node in model.decoder.get_inputs()
            if node.name.startswith("past")
        }
        row = [config.decoder_start_token_id]
        while len(row) <= len(ids) + EXTRA and row[-1] != config.eos_token_id:
            inputs = {"input_ids": np.array([row[-1:]]), "encoder_hidden_states": encoded}
            logits, *present = model.decoder.run(None, {**inputs, **source, **past})
            past = dict(zip(past, present, strict=True))
            logits[..., [word for (word,) in config.bad_words_ids]] = -np.inf
            row.append(int(logits[0, -1].argmax()))
        found.append(row[1:])
    return found


def assert_alike(found, expected, kind):
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    assert equal >= (len(expected) if kind == "float32" else 0.98 * len(expected))
    assert all(found)


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
    model = pages / kind / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = tokenizer.batch_decode(greedy(model), skip_special_tokens=True)

    facts = json.loads((pages / kind / "page.json").read_text("utf-8"))
    assert (facts["facts"]["Languages"], facts["facts"]["Licence"]) == ("de → en", "mit")
    assert facts["longestSource"] == 40
    assert not (model / "run.json").exists()
    names = {file.name for file in (pages / kind).iterdir()}
    assert names == {"index.html", "page.css", "page.js", "page.json", "model", "runtime"}

    with served(pages / kind) as address, open_browser() as browser:
        reader = Reader(browser, address)
        halves = [reader.type("\n".join(part)) for part in (LINES[:50], LINES[50:])]
        assert_alike([*halves[0], *halves[1]], expected, kind)

        assert reader.type("", "Type some text") == []
        assert reader.type("x" * 20_000, "A text has at most 5,000 characters") == []
        odd = reader.type("😀👍🏽\n\n\u0000\u0007\u200b\ud800\n你好")
        assert [bool(one) for one in odd] == [True, False, True, True]
        assert reader.type("zwei " * 60)[0].startswith("A line has at most 40 tokens, got ")
        assert reader.hosts() == {"127.0.0.1"}
        console = [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
        assert console == []


def test_tokenizer_that_the_browser_would_read_otherwise_is_refused(tmp_path, refused):
    source = save_model(tmp_path / "model", kind="unigram")

    told = refused("export", "--format", "web", source, tmp_path / "out")

    assert "got Unigram, which has no byte fallback there" in told
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def fake_npm(folder, script):
    folder.mkdir()
    file = folder / "npm"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_npm_that_fails_or_is_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_npm(tmp_path / "bin", "echo 'no network' >&2; exit 1"))
    with pytest.raises(OSError, match=r"needs the npm package .* cannot download it: no network"):
        web.runtime(tmp_path)

    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "runtime").rmdir()
    with pytest.raises(OSError, match=r"and npm is not installed\. Install Node\.js"):
        web.runtime(tmp_path)


def test_other_files_than_the_pinned_ones_are_refused(tmp_path, monkeypatch):
    script = "mkdir -p package/dist && cd package && touch LICENSE dist/transformers.web.min.js"
    script += " dist/ort.wasm.bundle.min.mjs dist/ort-wasm-simd-threaded.wasm"
    script += " && cd .. && tar czf x.tgz package"
    monkeypatch.setenv("PATH", fake_npm(tmp_path / "bin", script))

    with pytest.raises(ValueError, match=r"must have the SHA-256 [0-9a-f]{64}, got e3b0c442"):
        web.runtime(tmp_path)

    assert [path for path in (tmp_path / "runtime").iterdir() if path.is_file()] == []


@pytest.mark.slow
@pytest.mark.network
def test_benchmark_scores_the_translations_of_each_page(pages, tmp_path):
    model = pages / "float32" / "model"
    outputs = AutoTokenizer.from_pretrained(model).batch_decode(
        greedy(model)[:9], skip_special_tokens=True
    )
    for name, lines in (("de", LINES[:9]), ("en", outputs)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    report = tmp_path / "report.md"

    with open_browser():
        done = run_script(
            *(ROOT / "benchmarks" / "web.py", "--pages", pages / "float32", pages / "int8"),
            *("--test", tmp_path / "de", tmp_path / "en", "--lines", 9, "--output", report),
        )

    assert done.returncode == 0, done.stderr
    first, second = report.read_text("utf-8").splitlines()[-2:]
    assert first.startswith("| float32 |")
    assert first.endswith("| 100.00 | 9 |")  # chrF
    assert second.startswith("| int8 |")
