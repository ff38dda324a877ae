"""`benchmarks/generation.py`: contenders that are the same function, and the table."""

import pytest

import generation
from generation import (
    cells,
    check_same_outputs,
)

from ..models import build_variant
from ..support.documents import ROOT
from ..support.scripts import run_script

END = 2
LINES = ["a dog runs", "a man sleeps", "two women are reading a long book", "nobody"]


@pytest.fixture(autouse=True)
def measure_at_once(monkeypatch):
    monkeypatch.setattr(generation, "SECONDS_TO_SETTLE", 0)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A saved model with random parameters and a tokenizer of its size."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    build_variant().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
