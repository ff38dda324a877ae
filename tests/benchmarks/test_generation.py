"""`benchmarks/generation.py`: contenders that are the same function, and the table."""

import sys
from types import SimpleNamespace

import pytest
import torch

import generation
from generation import (
    Task,
    cells,
    check_same_outputs,
    load,
    prepare,
    write_random_model,
)
from vanilla_transformer import VanillaTransformerTokenizer

from ..models import build_variant
from ..support.documents import ROOT
from ..support.scripts import run_script

END = 2
SOURCES = [
    [17, 5, 9, 30, END],
    [13, END],
    [8, 21, 36, 4, 11, 26, END],
    [6, 33, 19, END],
]
LINES = ["a dog runs", "a man sleeps", "two women are reading a long book", "nobody"]


@pytest.fixture(autouse=True)
def measure_at_once(monkeypatch):
    monkeypatch.setattr(generation, "SECONDS_TO_SETTLE", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model with random parameters and a tokenizer of its size."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    build_variant().save_pretrained(folder)
    letters = "abcdefghijklmnopqrstuvwxyz .,!?-'"
    VanillaTransformerTokenizer.train([letters], vocab_size=37, kind="char").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def contenders(folder):
    folders = prepare(folder, ["vanilla", "inherited", "m2m100"], [], folder.parent)
    return load(folders, "float32")


def task(num_beams, is_forced=False):
    return Task([SOURCES[:3], SOURCES[3:]], 12, is_forced, num_beams)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["inherited", "m2m100"])
def test_contenders_find_our_translations(contenders, name, num_beams):
    _, ours = contenders["vanilla"].run(task(num_beams))
    _, theirs = contenders[name].run(task(num_beams))

    assert theirs == ours
    assert len({len(output) for output in ours}) > 1
    assert any(output[-1] == END for output in ours)
    assert not any(END in output[:-1] for output in ours)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_forced_outputs_have_the_limit_as_length(contenders, num_beams):
    for contender in contenders.values():
        _, outputs = contender.run(task(num_beams, is_forced=True))

        assert [len(output) for output in outputs] == [12] * 4
        assert not any(END in output for output in outputs)


def test_cells_have_the_speed_against_m2m100_and_what_is_the_same():
    seconds = {"vanilla": [1.0, 4.0, 2.0], "m2m100": [8.0, 5.0, 4.0]}
    outputs = {"vanilla": [[5, END], [6, 7, END]], "m2m100": [[5, END], [6, END]]}

    assert cells("vanilla", seconds, outputs) == ["1.00", "0.50-2.00", "2.50", "2", "100.0%"]
    assert cells("m2m100", seconds, outputs) == ["0.40", "0.25-0.50", "1.00", "1", "50.0%"]
    del seconds["m2m100"]
    assert cells("vanilla", seconds, outputs)[2] == "1.00"


def test_other_outputs_are_refused():
    outputs = {
        "vanilla": [[5, END]] * 10,
        "m2m100": [[5, END]] * 9 + [[6, END]],
        "ctranslate2-int8": [[6, END]] * 10,
    }

    with pytest.raises(ValueError, match=r"m2m100 must .* 95% .* got 90.0%"):
        check_same_outputs(outputs)
    check_same_outputs({name: outputs[name] for name in ("vanilla", "ctranslate2-int8")})


def test_marian_gets_a_part_of_a_batch_for_each_thread_and_the_limit(tmp_path, monkeypatch):
    asked = []

    def translate(lines, **options):
        asked.append((lines, options))
        return ["word5 </s>"] * len(lines)

    def start(options):
        assert options.endswith("marian/decoder.yml --cpu-threads 2 --quiet --quiet-translation")
        return SimpleNamespace(translate=translate)

    monkeypatch.setitem(sys.modules, "pymarian", SimpleNamespace(Translator=start))
    monkeypatch.setattr(generation, "has_engine", lambda: True)
    monkeypatch.setattr(generation, "RANDOM_VOCABULARY", 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    write_random_model("tiny", tmp_path / "model", is_marian=True)
    folders = prepare(tmp_path / "model", ["vanilla", "marian"], [], tmp_path)
    vanilla, marian = load(folders, "float32").values()
    batches = [[[5, 7, 9, 0], [6, 0]], [[8, 0]]]

    _, outputs = marian.run(Task(batches, 6, is_forced=True, num_beams=3))

    assert outputs == [[5, 0]] * 3
    assert [lines for lines, _ in asked] == [["word5 word7 word9", "word6"], ["word8"]]
    assert [options["mini-batch"] for _, options in asked] == [1, 1]
    assert [options["max-length-factor"] for _, options in asked] == [5.5 / 4, 5.5 / 2]
    assert asked[0][1]["beam-size"] == 3
    _, outputs = vanilla.run(Task(batches, 6, is_forced=True, num_beams=3))
    assert [len(output) for output in outputs] == [6] * 3


@pytest.mark.slow
def test_script_prints_a_row_for_each_contender(folder, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VANILLA_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    test = tmp_path / "test.txt"
    test.write_text("\n".join(LINES), encoding="utf-8")

    done = run_script(
        *(ROOT / "benchmarks" / "generation.py", "--model", folder, "--test", test),
        *("--sentences", 4, "--rounds", 1, "--beams", 2, "--batch_sizes", 1, 3),
        *("--threads", 1, 2),
    )

    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    headers = [row for row in rows if row[0] == "| search"]
    rows = [row for row in rows if row[0] == "| beam 2"]
    # Two batch sizes; bfloat16 without CTranslate2.
    assert len(headers) == 2
    assert len(rows) == 2 * 5 + 2 * 3
    assert {len(row) for row in rows} == {len(headers[0])}
    assert all(row[-1] == "100.0% |" for row in rows if row[2] == "vanilla")
