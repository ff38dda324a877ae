"""`benchmarks/peers.py`: its tables, and what is the same for all toolkits."""

import ast
import math
import os
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from vanilla_transformer_tools.settings import PRESETS

from ..support.documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import peers
import peers_toolkits
from peers_toolkits import CONFIGS, TOOLKITS, Job, Text, Toolkit

FAKE = Toolkit(
    files=("fake.yaml",),
    train="$config",
    report="^step",
    checkpoint="$update.txt",
    translate="-c 'import sys; print(open(sys.argv[1]).read(), end=str())' $checkpoint",
    writes_output=False,
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A training run whose program is what a test writes into its template."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(peers_toolkits, "CONFIGS", tmp_path / "configs")
    text = SimpleNamespace(folder=tmp_path, max_tokens=9, pairs_per_update=2, lengths=[1, 2])
    made = Job(FAKE, sys.executable, text, tmp_path / "run", updates=8, report=3, save=6)

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


def prepared(folder, **changes):
    files = corpus(folder)
    settings = {"vocab_size": 300, "max_tokens": 60, "max_pairs": None} | changes
    return Text.prepare(folder, files, files, **settings)


def test_speeds_are_compared_with_the_first_and_memory_is_the_most():
    measured = {
        "vanilla": [([2.0, 4.0], 100_000_000), ([2.0], 300_000_000)],
        "eole": [([8.0], 700_000_000), ([4.0, 2.0], 600_000_000)],
        "joeynmt": [],
    }

    cells = peers.speed_cells(1200, measured)

    assert peers.SPEED[1:5] == ("tokens/s", "range", "speed", "memory, MB")
    assert cells == {
        "vanilla": ["600", "300-600", "1.00", "300"],
        "eole": ["300", "150-600", "0.50", "700"],
        "joeynmt": ["failed", "-", "-", "-"],
    }


def test_minutes_are_those_of_the_first_checkpoint_with_the_bleu():
    scores = [(1.0, 200, 20.0, 10**8), (2.0, 400, 35.1, 2 * 10**8), (3.0, 600, 36.0, 10**9)]

    def cells(goal, limit):
        return peers.minutes_cells(SimpleNamespace(scores=lambda: iter(scores)), goal, limit)

    assert peers.TIME[1:5] == ("minutes", "updates", "BLEU", "memory, MB")
    assert cells(35, 60) == ["2.0", "400", "35.1", "200"]
    assert cells(40, 3) == ["more than 3.0", "600", "36.0", "1,000"]


def test_failed_toolkits_are_reported_and_have_a_row(monkeypatch, capsys):
    def fail(self, epochs):
        raise RuntimeError("No module named 'joeynmt'")

    monkeypatch.setattr(Job, "epoch_seconds", lambda self, epochs: ([0.5] * epochs, 7_000_000))
    text = SimpleNamespace(
        folder=ROOT, lengths=SimpleNamespace(sum=lambda: 1000), updates={True: 4, False: 5}
    )
    options = Namespace(rounds=2, epochs=3)

    peers.print_speeds(text, {"vanilla": "python"}, options)
    monkeypatch.setattr(Job, "epoch_seconds", fail)
    peers.print_speeds(text, {"m2m100": "python"}, options)

    out, errors = capsys.readouterr()
    rows = [line for line in out.splitlines() if "---" not in line and "toolkit" not in line]
    lines = {name: TOOLKITS[name].lines() for name in ("vanilla", "m2m100")}
    assert rows == [
        f"| vanilla | 2,000 | 2,000-2,000 | 1.00 | 7 | {lines['vanilla']} |",
        f"| m2m100 | failed | - | - | - | {lines['m2m100']} |",
    ]
    assert "m2m100 failed. No module named 'joeynmt'" in errors


@pytest.mark.parametrize("updates", ["25", "0"])
def test_checkpoints_between_two_reports_are_refused(monkeypatch, capsys, tmp_path, updates):
    argv = ["peers.py", "--data", str(tmp_path), "--until_bleu", "30", "--save_every", updates]
    monkeypatch.setattr(sys, "argv", argv)

    assert peers.main() == 2

    errors = capsys.readouterr().err
    assert "--save_every must be a multiple of 10" in errors
    assert f"got {updates}." in errors


def test_toolkits_without_an_environment_are_refused(monkeypatch, capsys, tmp_path):
    argv = ["peers.py", "--data", str(tmp_path), "--toolkits", "vanilla", "eole"]
    monkeypatch.setattr(sys, "argv", [*argv, "--environments", "joeynmt=python"])

    assert peers.main() == 2

    assert (
        "--toolkits must be of vanilla, vanilla-bf16, m2m100, joeynmt, got eole. "
        in capsys.readouterr().err
    )


def test_lines_are_those_that_a_user_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(peers_toolkits, "CONFIGS", tmp_path)
    (tmp_path / "one.yaml").write_text("# how to run\na: 1\n\n    # why\nb:\n    - 2\n")
    (tmp_path / "two.py").write_text('"""What."""\n\nprint(1)  # why\n')

    assert replace(FAKE, files=("one.yaml", "two.py")).lines() == 4


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


def test_all_toolkits_read_the_same_pieces(tmp_path):
    text = prepared(tmp_path, max_pairs=47)

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
    assert len(lines[0]) == text.pairs_per_update * text.updates[False] < 47
    assert (tmp_path / "first.de").read_text("utf-8") == lines[1][0] + "\n"


def test_translations_are_scored_in_whole_words(tmp_path):
    text = prepared(tmp_path, vocab_size=285)
    # Sources are translated into themselves, and one line has another word.
    same = Text.prepare(
        tmp_path, *[(text_file(tmp_path),) * 2] * 2, vocab_size=285, max_tokens=60, max_pairs=None
    )
    lines = (tmp_path / "validation.en").read_text("utf-8").splitlines()

    assert any(len(line.split()) > 7 for line in lines)
    assert same.bleu(lines) == pytest.approx(100)
    assert same.bleu([lines[1], *lines[1:]]) < 100
    with pytest.raises(ValueError, match="must be 60 translations, got 59"):
        text.bleu(lines[1:])


def text_file(folder):
    return corpus(folder)[0]


def test_epoch_before_the_first_report_does_not_count(job):
    program = (
        "import time\nfor n in range(9):\n    time.sleep(0.1 if n else 0.3)\n    print('step')\n"
    )

    seconds, peak = job(program).epoch_seconds(2)

    assert seconds == pytest.approx([0.1, 0.1], abs=0.05)
    assert 1e6 < peak < 1e8


def test_memory_is_that_of_the_children_too(job):
    # The child waits for input that does not come.
    child = "import sys; data = b'x' * 10**8; print('step'); sys.stdin.read()"
    program = f"""
import os, subprocess, sys
subprocess.run([sys.executable, '-uc', {child!r}], stdin=os.pipe()[0])
"""
    _, peak = job(program).epoch_seconds(0)

    assert 1e8 < peak < 2e8


def test_training_that_ends_is_an_error_with_its_last_lines(job):
    with pytest.raises(RuntimeError, match=r"status 3 after 3 updates: .*\nstep\nToo bad\n"):
        job("print('step')\nprint('Too bad')\nraise SystemExit(3)").epoch_seconds(1)


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


def test_process_ends_with_its_job(job):
    with job("import time\nprint('step', flush=True)\ntime.sleep(5)").running() as process:
        assert os.getpgid(process.pid) == process.pid

    assert process.returncode == -9


def test_failed_translation_is_an_error(job):
    run = job("")
    run.folder.mkdir()
    (run.text.folder / "validation.en").write_text("")

    with pytest.raises(RuntimeError, match=r"(?s)Translating must succeed, got status 1.*6\.txt"):
        run.translate(6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "m2m100"])
def test_toolkit_trains_and_translates(tmp_path, name):
    text = prepared(tmp_path)
    toolkit = TOOLKITS[name]
    updates = text.updates[toolkit.batches_by_tokens]
    timed = Job(toolkit, sys.executable, text, tmp_path / "timed", 10**6, updates, 10**6)
    saved = Job(toolkit, sys.executable, text, tmp_path / "saved", 10**6, 2, 4)

    seconds, peak = timed.epoch_seconds(2)
    scores = saved.scores()
    found = [next(scores)[1:3] for _ in range(2)]
    scores.close()

    assert len(seconds) == 2
    assert peak > 1e8
    assert [updates for updates, _ in found] == [4, 8]
    assert all(0 <= bleu <= 100 for _, bleu in found)
