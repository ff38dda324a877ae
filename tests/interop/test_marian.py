"""Marian's own models: the log-probabilities and outputs of the engine itself.

`marian_scores.json` has what the engine computed for the models of `support/marian.py`; the slow
tests install it and compare anew (`MARIAN_RECORD=1` writes the file).
"""

import functools
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.interop.importing import import_model, load_source
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation import Translator

from ..support.marian import (
    ENTRIES,
    PACKAGE,
    POST_NORM,
    SHAPES,
    Engine,
    random_arrays,
    random_lines,
    save_marian,
    words,
    write_npz,
)
from ..support.pretrained import ENGLISH, GERMAN, PIECES, train_pieces

SCORES = Path(__file__).with_name("marian_scores.json")
LENGTHS = [4, 21, 101]
# Of a sum over 300 tokens in float32, in another order.
TOLERANCE = 2e-3
DECODED = [name for name in SHAPES if "transformer-preprocess" not in SHAPES[name]]


def sources_of(name):
    return random_lines(words("s", (POST_NORM | SHAPES[name])["dim-vocabs"][0]), LENGTHS)


def scores(folder, sources, targets):
    """Log-probability of each target with its `</s>`, by one of our models."""
    model = load_model(str(folder)).eval()
    pair = TokenizerPair.from_pretrained(str(folder))
    found = []
    for source, target in zip(sources, targets, strict=True):
        ids = pair.target(text_target=target)["input_ids"]
        start = [[model.config.decoder_start_token_id, *ids[:-1]]]
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([pair.source(source)["input_ids"]]),
                decoder_input_ids=torch.tensor(start),
            ).logits
        found.append(logits[0].log_softmax(-1)[range(len(ids)), ids].sum().item())
    return found


def translate(folder, source, beams):
    """One output, at most as long as Marian's: three times the source with its `</s>`."""
    settings = {"num_beams": beams, "length_penalty": 1.0}
    limit = 2 * (len(source.split()) + 1)
    translator = Translator.from_pretrained(
        str(folder), engine="torch", max_extra_tokens=limit, **settings
    )
    (found,) = translator.translate([source])
    return found.text


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """By shape: the folders of Marian's model and of ours, which tests do not change."""

    @functools.cache
    def make(name):
        root = tmp_path_factory.mktemp(name)
        folder = save_marian(root / "marian", SHAPES[name])
        import_model(str(folder), root / "ours")
        return folder, root / "ours"

    return make


@pytest.mark.parametrize("name", SHAPES)
def test_log_probabilities_and_greedy_outputs_are_those_of_marian(name, imported):
    recorded, sources = json.loads(SCORES.read_text())[name], sources_of(name)
    _, ours = imported(name)

    found = scores(ours, sources, recorded["targets"])

    assert found == pytest.approx(recorded["scores"], abs=TOLERANCE)
    if name in DECODED:
        assert translate(ours, sources[1], 1) == recorded["targets"][1]


@pytest.mark.parametrize(
    ("version", "activation"),
    [("v1.9.0 ba94c5b9", "quick_gelu"), ("v1.12.0 65bf82f", "quick_gelu"), ("v1.12.42", "gelu")],
)
def test_gelu_is_that_of_the_release_that_saved_the_model(tmp_path, version, activation):
    changes = {"version": version, "transformer-ffn-activation": "gelu"}

    source = load_source(str(save_marian(tmp_path / "marian", changes)))

    assert source.plan()[0].config.activation_function == activation


def test_sentencepiece_vocabulary_splits_text(tmp_path):
    folder = tmp_path / "marian"
    pieces = train_pieces((*GERMAN, *ENGLISH), "unigram")
    save_marian(folder, {"dim-vocabs": [PIECES, PIECES]})
    (folder / "vocab.spm").write_bytes(pieces)
    decoder = (folder / "decoder.yml").read_text().replace("vocab.yml", "vocab.spm")
    (folder / "decoder.yml").write_text(decoder)

    import_model(str(folder), tmp_path / "ours")

    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    line = f"{GERMAN[5]}  {ENGLISH[7]} ж"
    end = processor.eos_id()
    assert tokenizer(line)["input_ids"] == [*processor.encode(line), end]
    assert (
        tokenizer.decode(tokenizer(GERMAN[5])["input_ids"], skip_special_tokens=True) == GERMAN[5]
    )


def with_arrays(**arrays):
    return lambda file: write_npz(file, random_arrays(POST_NORM) | arrays, POST_NORM)


def with_settings(**changes):
    settings = POST_NORM | {name.replace("_", "-"): value for name, value in changes.items()}
    return lambda file: write_npz(file, random_arrays(POST_NORM), settings)


BAD = {
    "no_settings": (
        lambda file: write_npz(file, random_arrays(POST_NORM), None),
        ["must hold the settings"],
    ),
    "size": (with_settings(dim_vocabs=[ENTRIES + 1] * 2), ["must have 91 and 91 entries"]),
    "cut": (
        lambda file: file.write_bytes(file.read_bytes()[:9999]),
        ["must be numbers that can be read", "Copy the file again"],
    ),
    "objects": (
        with_arrays(Wemb=np.array([{}, {}], dtype=object)),
        ["must be numbers that can be read, got: Object arrays"],
    ),
    "learned": (
        with_arrays(Wpos=np.ones((9, 64), np.float32)),
        ["`learned-positions` must be False, got True"],
    ),
    # All reasons at once.
    "kind": (
        with_settings(
            type="s2s",
            transformer_decoder_autoreg="rnn",
            transformer_postprocess="dhn",
            lemma_dim_emb=8,
        ),
        [
            "`type` must be 'transformer', got 's2s'",
            "`transformer-decoder-autoreg` must be 'self-attention', got 'rnn'",
            "`layer-operations` must be",
            "`lemma-dim-emb` must be 0, got 8",
        ],
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_model_is_refused(fault, tmp_path, refused):
    folder = save_marian(tmp_path / "marian")
    damage, messages = BAD[fault]
    damage(folder / "model.npz")

    told = refused("import", folder / "model.npz", tmp_path / "ours")

    assert all(message in told for message in messages), told
    assert not (tmp_path / "ours").exists()


def test_model_of_transformers_says_whose_positions_it_has(pretrained, tmp_path, capsys):
    folder, _ = pretrained("marian")
    main(["import", str(folder), str(tmp_path / "theirs")])
    assert "positions as MarianMTModel computes them" in capsys.readouterr().out
    main(["import", str(folder), str(tmp_path / "ours"), "--positions", "marian"])
    assert "positions as Marian computes them" in capsys.readouterr().out

    theirs, ours = (load_model(str(tmp_path / name)).config for name in ("theirs", "ours"))
    half = theirs.d_model // 2
    assert theirs.position_base == 10_000
    assert ours.position_base == pytest.approx(10_000 ** (half / (half - 1)))


def test_other_classes_have_no_positions_of_marian(pretrained, tmp_path, refused):
    folder, _ = pretrained("bart")

    told = refused("import", folder, tmp_path / "ours", "--positions", "marian")

    assert "needs a MarianMTModel" in told


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """Marian in an environment of its own; skips where it cannot be had."""
    if not (os.environ.get("WITH_MARIAN") or os.environ.get("PYMARIAN")):
        pytest.skip("Marian's own engine, 600 MB, is asked by `make test-all` (WITH_MARIAN=1)")
    if found := os.environ.get("PYMARIAN"):
        return Engine(Path(sys.executable), found)
    folder = tmp_path_factory.mktemp("engine") / "environment"
    venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", PACKAGE]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{PACKAGE} cannot be installed here")
    return Engine(python)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_engine_computes_and_finds_the_same(engine, name, imported):
    folder, ours = imported(name)
    sources = sources_of(name)
    targets = [text for text, _ in engine.translate(folder, sources, 1)]
    assert len(targets[-1].split()) > 250

    expected = engine.score(folder, sources, targets)

    assert scores(ours, sources, targets) == pytest.approx(expected, abs=TOLERANCE)
    for beams in (1, 4) if name in DECODED else ():
        found = translate(ours, sources[1], beams)
        assert engine.translate(folder, sources[1:2], beams)[0][0] == found
    if os.environ.get("MARIAN_RECORD"):
        recorded = json.loads(SCORES.read_text()) if SCORES.exists() else {}
        recorded[name] = {"targets": targets, "scores": expected}
        SCORES.write_text(json.dumps(recorded, indent=0) + "\n")
