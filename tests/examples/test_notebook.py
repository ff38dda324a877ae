"""The notebooks run from top to bottom from the package alone, and show what they say."""

import re

import nbformat
import pytest

from ..support.documents import ROOT

LESSON, FINE_TUNING = "from_text_to_model", "fine_tune_imported_model"
# Parameters with which a notebook runs in seconds.
MINUTE = {
    LESSON: {"TRAINING_PAIRS": 200, "TEST_PAIRS": 4, "UPDATES": 4},
    FINE_TUNING: {"PRETRAINING_UPDATES": 2, "UPDATES": 2},
}


def read_notebook(name):
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def with_parameters(name, **values):
    """A notebook, whose cell of parameters has other values."""
    notebook = read_notebook(name)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assigned = {}
    exec(cell.source, assigned)
    assert values.keys() <= assigned.keys()
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    return notebook


def printed(notebook):
    """All that the cells have printed."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    return "".join(output.text for output in outputs if output.output_type == "stream")


def pictures_of(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def check_lesson(notebook):
    """What the lesson says of its numbers is true."""
    text = printed(notebook)
    masked, unmasked = map(float, re.findall(r"^with\w* mask +([\d.]+) % exact", text, re.M))
    assert masked > 95
    assert unmasked < 5
    ordered, orderless = re.findall(r"^with\w* positions +(.+) \| (.+)$", text, re.M)
    assert ordered[0] == "two hundred forty-five"
    assert ordered[1] != ordered[0]
    assert orderless[0] == orderless[1]
    smoothed, plain = (
        list(map(float, row.split()))
        for row in re.findall(r"^ +(0\.[01] .*)$", text.partition("smoothing")[2], re.M)
    )
    assert smoothed[1] > 10 * plain[1]
    assert smoothed[2] < 0.95 < plain[2]
    assert min(smoothed[3], plain[3]) > 95
    beams = [list(map(float, row)) for row in re.findall(r"^ +(\d) +([\d.]+) +(-\S+)$", text, re.M)]
    assert [row[0] for row in beams] == [1, 2, 4, 8]
    assert [row[2] for row in beams] == sorted(row[2] for row in beams)
    assert beams[-1][1] > beams[0][1]
    # Losses, attention, positions, losses without the mask.
    assert len(pictures_of(notebook)) == 4


def check_fine_tuning(notebook):
    """What the second notebook says of its numbers is true."""
    rows = re.findall(r"^(.+?) +numbers +([\d.]+) +prices +([\d.]+)$", printed(notebook), re.M)
    scores = {name: (float(numbers), float(prices)) for name, numbers, prices in rows}
    assert scores["imported"][0] > 95
    assert scores["imported"][1] < 5
    assert scores["fine-tuned"][1] > scores["from scratch"][1] + 5
    assert scores["fine-tuned"][0] < 5
    assert scores["fine-tuned on a mixture"][0] > 90
    assert scores["fine-tuned on a mixture"][1] > scores["from scratch"][1]


CHECKS = {LESSON: check_lesson, FINE_TUNING: check_fine_tuning}


@pytest.mark.parametrize("name", CHECKS)
def test_cells_of_the_notebook_run(name, monkeypatch, capsys):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    namespace = {}

    for cell in code_cells(with_parameters(name, **MINUTE[name])):
        exec(compile(cell.source, cell.id, "exec"), namespace)

    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHECKS)
def test_notebook_runs_in_a_kernel_and_shows_what_it_says(name, tmp_path):
    notebook = read_notebook(name)
    # It takes a second to import.
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()

    CHECKS[name](notebook)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CHECKS)
def test_stored_results_are_those_of_one_run_from_top_to_bottom(name):
    notebook = read_notebook(name)
    cells = code_cells(notebook)

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    CHECKS[name](notebook)
