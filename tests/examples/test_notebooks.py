"""The notebook runs from top to bottom without a network, and is stored with its outputs."""

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

from tests.conftest import PACKAGE

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebooks" / "analysis.ipynb"
if not NOTEBOOK.exists():
    pytest.skip("the examples are not beside these tests", allow_module_level=True)


@pytest.fixture(scope="module")
def executed():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:  # pytest's names are too long for a socket
        kernel = AsyncKernelManager(
            kernel_name="python3",
            transport="ipc",
            ip=f"{folder}/kernel",
            connection_file=f"{folder}/kernel.json",
        )
        client = NotebookClient(
            notebook,
            timeout=300,
            startup_timeout=300,
            resources={"metadata": {"path": folder}},
            km=kernel,
        )
        settings = {
            "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]),
            "IPYTHONDIR": folder,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        client.execute(env={**os.environ, **settings})
    return notebook


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_it_is_stored_with_the_outputs_of_one_run_and_without_warnings_and_paths():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = outputs(notebook)
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2
    assert not any(output.get("name") == "stderr" for output in shown)
    assert not re.search(r"/(home|root|tmp|usr)/", NOTEBOOK.read_text("utf-8"))


def test_its_links_lead_to_pages():
    text = NOTEBOOK.read_text("utf-8")
    links = re.findall(r"\]\((\.\.[^)#]+)", text)
    assert links and all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.slow
def test_it_runs_and_shows_what_it_says(transformers, executed):
    shown = outputs(executed)
    text = "".join(output.get("text", "") for output in shown)
    assert "The word vectors share a direction" in text
    assert "Measured: transformer.wte" in text
    rising = [float(value) for value in re.findall(r"mean_cosine (\S+)", text)]
    assert len(rising) == 4 and rising[0] < 0.01 and rising[-1] > 0.2
    pictures = [output for output in shown if "image/png" in output.get("data", {})]
    frames = [output for output in shown if "text/html" in output.get("data", {})]
    assert len(pictures) == 2 and len(frames) == 2
    assert "mean_cosine_rare" in frames[-1]["data"]["text/plain"]
