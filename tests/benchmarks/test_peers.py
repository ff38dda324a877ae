"""`benchmarks/peers.py`: its tables, and what is the same for all toolkits."""

import ast
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

import peers
from peers import CONFIGS, TOOLKITS, Job, Toolkit
from vanilla_transformer_tools.settings import PRESETS

FAKE = Toolkit(
    config="fake.yaml",
    train="$config",
    report="^step",
    checkpoint="$update.txt",
    translate="-c 'import sys; print(open(sys.argv[1]).read(), end=str())' $checkpoint > $output",
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A training run whose program is what a test writes into its template."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(peers, "CONFIGS", tmp_path / "configs")
    text = SimpleNamespace(folder=tmp_path, updates={False: 1}, lengths=[1, 2])
    made = Job(FAKE, sys.executable, text, tmp_path / "run", report=3, save=6)

    def program(source):
        (tmp_path / "configs" / "fake.yaml").write_text(source, encoding="utf-8")
        return made

    return program


def corpus(folder):
    """Files of 60 pairs, the source and the target of each of another length."""
    words = ["ein", "zwei", "junge", "männer", "im", "freien", "."]
    paths = []
    for side in (0, 1):
        lines = [" ".join(words[: 1 + (n + side) % 7]) for n in range(60)]
        paths.append(folder / f"side{side}.txt")
        paths[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tuple(map(str, paths))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepares a text of small batches, from the first pairs or all."""
    monkeypatch.setattr(peers, "VOCABULARY", 300)
    monkeypatch.setattr(peers, "TOKENS", 60)

    def prepare(max_pairs=None):
        files = corpus(tmp_path)
        return peers.prepare(tmp_path, files, files, max_pairs)

    return prepare


@pytest.mark.parametrize("name", ["joeynmt", "eole", "opennmt", "m2m100"])
def test_sizes_and_schedule_are_those_of_our_preset(name):
    ours = numbers("vanilla")
    theirs = numbers(name)
    preset = PRESETS[ours["preset"]]

    if name == "m2m100":
        source = (CONFIGS / "m2m100.py").read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        (sizes,) = (
            {word.arg: word.value.value for word in call.keywords if word.arg != "vocab_size"}
            for call in calls
            if getattr(call.func, "id", "") == "M2M100Config"
        )
        assert preset.config().items() <= sizes.items()
    elif name == "joeynmt":
        names = ("num_layers", "num_heads", "hidden_size", "ff_size", "dropout")
        for side in ("encoder", "decoder"):
            assert [theirs["model"][side][field] for field in names] == sizes_of(preset)
        theirs = theirs["training"]
    else:
        model, training = (theirs.get(part, theirs) for part in ("model", "training"))
        names = ("layers", "heads", "hidden_size", "transformer_ff")
        sizes = [*(model[field] for field in names), *training["dropout"]]
        assert sizes == sizes_of(preset)
        theirs = training
        # Noam's schedule divides its factor by the roots of the width and of the warm-up.
        theirs["learning_rate"] /= math.sqrt(preset.d_model * theirs["warmup_steps"])
    warmup = theirs.get("warmup_steps") or theirs["learning_rate_warmup"]
    smoothing = theirs.get("label_smoothing") or theirs["label_smoothing_factor"]
    assert (theirs["learning_rate"], warmup, smoothing) == pytest.approx((0.004, 800, 0.1))
    assert (ours["learning_rate"], ours["warmup_steps"]) == (0.004, 800)


def sizes_of(preset):
    return [preset.layers, preset.heads, preset.d_model, preset.ffn_dim, preset.dropout]


def numbers(name):
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


def test_all_toolkits_read_the_same_pieces(prepared, tmp_path):
    text = prepared(max_pairs=47)

    lines = [(tmp_path / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    pieces = [[len(line.split()) for line in side] for side in lines]
    known = (tmp_path / "vocab.txt").read_text("utf-8").splitlines()
    # With the ends of sentences.
    assert [[1 + n for n in side] for side in pieces] == text.lengths.T.tolist()
    for side, path in zip(lines, corpus(tmp_path), strict=True):
        words = [line.replace(" ", "").replace("▁", " ").strip() for line in side]
        assert words == Path(path).read_text("utf-8").splitlines()[: len(words)]
    assert {piece for side in lines for line in side for piece in line.split()} <= set(known)
    assert len(known) == len(set(known)) <= 300 - 4
    # Equal numbers of pairs come out even.
    assert len(lines[0]) < 47
    assert len(lines[0]) % text.updates[False] == 0
    assert (tmp_path / "first.de").read_text("utf-8") == lines[1][0] + "\n"


@pytest.mark.slow
def test_checkpoint_is_scored_a_report_later_with_the_clock_halted(job):
    # Writes each checkpoint only after it has reported.
    program = """
import time
from pathlib import Path
Path('model').mkdir()
for n in range(1, 99):
    print('step')
    time.sleep(0.2)
    Path(f'model/{3 * n}.txt').write_text(f'{n}')
"""
    run = job(program)
    states = []

    def bleu(lines: list[str]) -> float:
        time.sleep(1)
        children = psutil.Process().children()
        states.extend(one.status() for one in children if one.cwd() == str(run.folder))
        return float(lines[0])

    run.text.bleu = bleu
    (run.text.folder / "validation.en").write_text("")
    scores = run.scores()

    found = [next(scores) for _ in range(2)]
    scores.close()

    assert states == 2 * [psutil.STATUS_STOPPED]
    assert [(updates, bleu) for _, updates, bleu, _ in found] == [(6, 2.0), (12, 4.0)]
    # Two reports, of which one may sleep while it is halted; a score takes longer.
    assert 0.05 < 60 * (found[1][0] - found[0][0]) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "m2m100"])
def test_toolkit_trains_and_translates(prepared, tmp_path, name):
    text = prepared()
    toolkit = TOOLKITS[name]
    updates = text.updates[toolkit.batches_by_tokens]
    timed = Job(toolkit, sys.executable, text, tmp_path / "timed", updates)
    saved = Job(toolkit, sys.executable, text, tmp_path / "saved", 2, 4)

    seconds, peak = timed.second_report()
    scores = saved.scores()
    found = [next(scores)[1:3] for _ in range(2)]
    scores.close()

    assert seconds > 0
    assert peak > 1e8
    assert [updates for updates, _ in found] == [4, 8]
    assert all(0 <= bleu <= 100 for _, bleu in found)
