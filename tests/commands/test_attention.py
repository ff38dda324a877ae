"""The command `attention`: which file it writes, what it prints, and what it refuses."""

from functools import partial
from pathlib import Path

import pytest

from vanilla_transformer import VanillaTransformerTokenizer

from ..models import save_small_model

LINES = ["ein hund rennt", "a dog runs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=300)
    return save_small_model(tmp_path_factory.mktemp("model"), tokenizer, decoder_layers=2)


@pytest.fixture
def run(run, folder, tmp_path, monkeypatch):
    """Runs `attention` in an empty folder."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    return partial(run, "attention", "--model", folder)


def test_page_is_the_default(run):
    status, out, _ = run("ein hund", "a dog", "--kind", "decoder", "--layer", 2, "--head", 1)

    assert (status, out) == (0, "attention.html: ein hund -> a dog\n")
    assert [path.name for path in Path().iterdir()] == ["attention.html"]
    page = Path("attention.html").read_text(encoding="utf-8")
    assert '"target":"a dog"' in page
    assert '"kind":"decoder","layer":2,"head":1' in page


def test_alignments_are_written(run, write):
    sources, targets = write("a", *LINES), write("b", *LINES)

    status, links, _ = run("--alignments", sources, targets)
    _, out, _ = run("--alignments", sources, targets, "--output", "links")

    assert status == 0
    assert len(links.splitlines()) == 2
    assert out == ""
    assert Path("links").read_text() == links


def test_alignments_are_of_the_own_translations_without_targets(run, write):
    _, out, _ = run("--alignments", write("a", "ein hund", ""))

    first, second = out.split("\n")[:2]
    assert first
    assert second == ""
