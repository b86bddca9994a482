"""The notebook in `examples/` runs from the first cell to the last."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from ratchet.flows.train import train
from tests import tiny

NOTEBOOK = Path(__file__).parents[2] / "examples" / "inspect.ipynb"


def test_inspect(workspace: Path, tmp_path: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config(
        workspace,
        run__name="countdown",
        run__store=f"file://{tmp_path}/runs",
        reward__function="tests.rewards:letters",
        train__iterations=2,
    )
    train(config)
    monkeypatch.delenv("RATCHET_RUN", raising=False)
    folder = tmp_path / "examples"  # where Jupyter starts
    folder.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, startup_timeout=600, kernel_name="python3", resources=place).execute()
    outputs = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "image/png" in outputs, "the curve"
    assert "it000001-p00000" in outputs
    assert all("execution_count" not in cell or cell["execution_count"] for cell in notebook.cells)


def test_it_is_saved_with_its_outputs() -> None:
    """They are what the documentation site shows."""
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "executed once, in order"
    assert all(cell.outputs for cell in cells)
