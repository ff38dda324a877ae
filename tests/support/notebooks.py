"""Notebooks: reading them, and running them with other parameters."""

from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode


def read_notebook(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def with_parameters(path: Path, **values: Any) -> NotebookNode:
    """A notebook whose cell of parameters has other values."""
    notebook = read_notebook(path)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assigned: dict[str, Any] = {}
    exec(cell.source, assigned)
    assert values.keys() <= assigned.keys()
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    return notebook


def run_notebook(notebook: NotebookNode, folder: Path, seconds: int) -> NotebookNode:
    """Runs all cells, each for so many seconds at most; gives the same notebook with outputs."""
    # It takes a second to import, which most tests of notebooks can do without.
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=seconds, resources=resources, record_timing=False)
    return client.execute()
