"""The downloaded notebook, executed by Jupyter as a reader would."""

import nbformat
from conftest import offline_environment
from nbclient import NotebookClient


def test_notebook_executes(site, outcomes, tmp_path, monkeypatch):
    for name, value in offline_environment(tmp_path / "home", MPLBACKEND="agg").items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(site / "trl_interop.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = "".join(
        output["text"]
        for cell in notebook.cells[1:]
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    assert outcomes(0)["printed"].splitlines()[-4:] == printed.splitlines()[-4:]
