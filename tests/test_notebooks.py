"""The notebooks of the tutorials equal their scripts, show their outputs, and run."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks import SCRIPTS, execute, read

RENEW = "renew it: python -m tests.notebooks"
OWN_TEXT = "\n\n".join(
    f"The {name} was built in {year}. It is {year - 1800} m long. People visit the {name} every day."
    for year, name in enumerate(("bridge", "tower", "wall", "canal", "tunnel") * 10, start=1850)
)
LARGEST = 500_000  # bytes of a notebook with its outputs

pytestmark = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def committed(script: Path) -> Any:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def printed(cell: Any) -> str:
    """Return what a cell has written to standard output."""
    return "".join(output.text for output in cell.get("outputs", ()) if "text" in output)


def test_notebook_equals_its_script(script):
    """Both have the same cells in the same order."""
    source, notebook = (
        [(cell.cell_type, cell.source) for cell in each.cells]
        for each in (read(script), committed(script))
    )
    assert source == notebook, RENEW


def test_notebook_shows_the_outputs_of_one_execution(script):
    """All cells were executed in order, without an error, and the file is small."""
    cells = [cell for cell in committed(script).cells if cell.cell_type == "code"]

    assert [*range(1, len(cells) + 1)] == [cell.execution_count for cell in cells], RENEW
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"stream", "display_data"}
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    assert script.with_suffix(".ipynb").stat().st_size < LARGEST


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "has_own_text",
    [pytest.param(False, marks=pytest.mark.nightly), True],
    ids=["generated text", "own text"],
)
def test_notebook_runs(script, has_own_text, tmp_path):
    """Every cell runs, with few steps of pretraining, on the notebook's own text and on a reader's."""
    own_text = tmp_path / "own.txt"
    own_text.write_text(OWN_TEXT if has_own_text else "", encoding="utf-8")
    variables = {
        "TUTORIAL_STEPS": "20",
        "TUTORIAL_OUTPUT": str(tmp_path / "output"),
        "TUTORIAL_CORPUS": str(own_text) if has_own_text else "",
    }

    notebook = execute(script, variables)

    assert "status at the end: 0" in printed(notebook.cells[-2])
