"""Tokenizers for transformers.js: the ids of Python, or a reason why not."""

import json
import runpy
import shutil
import subprocess

import pytest
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerTokenizer

from ..support.documents import ROOT
from ..support.odd_text import odd_lines

fit = runpy.run_path(str(ROOT / "examples" / "web" / "fit_tokenizer.py"))["fit"]
# The release of `examples/web/build.sh`.
_TRANSFORMERS = "@huggingface/transformers@4.3.2"
TEXT = ["Der Hund läuft schnell.", "Ein Haus am See, 12 Äpfel!", "Der alte Mann läuft heim."] * 5

SCRIPT = """
import { readFileSync } from "fs";
import { AutoTokenizer, env } from "@huggingface/transformers";
env.allowRemoteModels = false; env.localModelPath = "/";
const [folder, lines] = JSON.parse(readFileSync("input.json", "utf8"));
const tokenizer = await AutoTokenizer.from_pretrained(folder);
const ids = lines.map(line => tokenizer(line, { return_tensor: false }).input_ids);
const texts = ids.map(row => tokenizer.decode(row, { skip_special_tokens: true }));
console.log(JSON.stringify([ids, texts]));
"""


@pytest.fixture(scope="module")
def in_node(tmp_path_factory):
    """Ids of lines, and their texts, by the transformers.js of the page; skips where none is."""
    folder = tmp_path_factory.mktemp("node")
    npm, settings = shutil.which("npm"), {"cwd": folder, "capture_output": True, "text": True}
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    (folder / "package.json").write_text("{}")
    (folder / "main.mjs").write_text(SCRIPT)
    command = [npm, "install", "--silent", "--ignore-scripts", "--no-audit", _TRANSFORMERS]
    done = subprocess.run(command, **settings, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot download {_TRANSFORMERS}: {done.stderr[-200:]}")

    def run(tokenizer, lines):
        (folder / "input.json").write_text(json.dumps([str(tokenizer), lines]))
        done = subprocess.run(["node", "main.mjs"], **settings, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def train(folder, **options):
    tokenizer = VanillaTransformerTokenizer.train(
        TEXT, vocab_size=400, target_languages=["de"], **options
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<ph>"]})
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
def test_python_reads_the_rewritten_files_as_before(tmp_path, kind):
    tokenizer = train(tmp_path, kind=kind)
    lines = odd_lines(300)

    fit(tmp_path)

    fitted = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(lines)["input_ids"]
    assert fitted(lines)["input_ids"] == ids
    texts = [one.batch_decode(ids, skip_special_tokens=True) for one in (tokenizer, fitted)]
    assert texts[0] == texts[1]
    assert len(fitted) == len(tokenizer)


def test_tokenizer_with_other_ids_there_is_refused_and_stays(tmp_path):
    tokenizer = train(tmp_path)
    tokenizer.add_tokens(["<a>"])
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    pipeline = json.loads(file.read_text("utf-8"))
    pipeline["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}
    file.write_text(json.dumps(pipeline), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    before = file.read_bytes()

    with pytest.raises(ValueError, match="would give other ids") as error:
        fit(tmp_path)

    _, normalizer, package, added = str(error.value).splitlines()
    assert normalizer.endswith("got Precompiled.")
    assert (
        package == "It must be one that vanilla-transformer trained, with `split_special_tokens`."
    )
    assert added.startswith("It must have no added tokens that are not special, got <a>: ")
    assert file.read_bytes() == before
    file.unlink()
    with pytest.raises(ValueError, match=r"needs a fast tokenizer, got none: tokenizer\.json"):
        fit(tmp_path)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
def test_ids_and_texts_equal_those_of_python(in_node, tmp_path, kind):
    tokenizer = train(tmp_path, kind=kind)
    fit(tmp_path)
    lines = odd_lines(10_000)

    ids, texts = in_node(tmp_path, lines)

    assert ids == tokenizer(lines)["input_ids"]
    assert texts == tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.network
def test_canonical_form_equals_that_of_python(in_node, tmp_path):
    tokenizer = train(tmp_path, kind="char")
    fit(tmp_path)
    # The two sides know different versions of Unicode, which add signs beyond this plane.
    lines = [*odd_lines(1_000), *(f"ﬁ {letter}\u0301\u0323 각 Ⅻ" for letter in "aeiouAEIOU")]

    ids, _ = in_node(tmp_path, lines)

    assert ids == tokenizer(lines)["input_ids"]
