"""The notebook runs from top to bottom, and its stored results read well on a web page."""

import nbformat
import pytest

from ..support.documents import ROOT

NOTEBOOK = ROOT / "examples" / "from_text_to_model.ipynb"


def read_notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def with_parameters(**values):
    """The notebook, whose cell of parameters has other values."""
    notebook = read_notebook()
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assigned = {}
    exec(cell.source, assigned)
    assert values.keys() <= assigned.keys()
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    return notebook


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
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    namespace = {}

    for cell in code_cells(with_parameters(TRAINING_PAIRS=200, TEST_PAIRS=10, UPDATES=2)):
        exec(compile(cell.source, cell.id, "exec"), namespace)

    plt.close("all")
    assert len(shown) == 1
    assert len(namespace["translations"]) == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebook_trains_a_model_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts"))
    notebook = with_parameters(UPDATES=400)
    # It takes a second to import.
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()

    exact, lines = exact_lines(notebook)
    assert lines == 1000
    assert exact > 900
    assert len(pictures_of(notebook)) == 2
    assert list(tmp_path.iterdir()) == []


def test_stored_results_are_those_of_one_run_from_top_to_bottom():
    notebook = read_notebook()
    cells = code_cells(notebook)

    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert exact_lines(notebook) == (1000, 1000)
    assert len(pictures_of(notebook)) == 2
