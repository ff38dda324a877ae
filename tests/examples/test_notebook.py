"""The notebook runs from top to bottom, and its stored results read well on a web page."""

import matplotlib.pyplot as plt
import pytest

from ..support.documents import ROOT
from ..support.notebooks import code_cells, read_notebook, run_notebook, with_parameters

NOTEBOOK = ROOT / "examples" / "from_text_to_model.ipynb"


def texts_of(notebook):
    """All that the cells have printed or shown as text."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    shown = [output.get("data", {}) for output in outputs]
    return [
        *(output.text for output in outputs if output.output_type == "stream"),
        *(data[kind] for data in shown for kind in data if kind.startswith("text/")),
    ]


def pictures_of(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def exact_lines(notebook):
    """Numbers of the test that are translated exactly, and all of them."""
    (table,) = (text for text in texts_of(notebook) if text.startswith("digits"))
    rows = [list(map(int, row.split())) for row in table.splitlines()[1:]]
    return sum(exact for _, exact, _ in rows), sum(lines for *_, lines in rows)


def test_cells_of_the_notebook_run(monkeypatch):
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    namespace = {}

    for cell in code_cells(with_parameters(NOTEBOOK, TRAINING_PAIRS=200, TEST_PAIRS=10, UPDATES=2)):
        exec(compile(cell.source, cell.id, "exec"), namespace)

    plt.close("all")
    assert len(shown) == 1
    assert len(namespace["translations"]) == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebook_trains_a_model_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts"))
    notebook = run_notebook(with_parameters(NOTEBOOK, UPDATES=400), tmp_path, seconds=300)

    exact, lines = exact_lines(notebook)
    assert lines == 1000
    assert exact > 900
    assert len(pictures_of(notebook)) == 2
    assert list(tmp_path.iterdir()) == []


def test_stored_results_are_those_of_one_run_from_top_to_bottom():
    notebook = read_notebook(NOTEBOOK)
    cells = code_cells(notebook)

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert exact_lines(notebook) == (1000, 1000)
    assert len(pictures_of(notebook)) == 2
