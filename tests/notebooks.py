"""Notebooks of the tutorials. `python -m tests.notebooks` executes their scripts and writes them with their outputs.

The source of a notebook is a script in jupytext's percent format next to it, because its changes can be reviewed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from traitlets.config import Config

from tests.conftest import ROOT

SCRIPTS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
CELL_S = 3600  # the longest time of one cell, on a busy machine


def read(script: Path) -> Any:
    """Return the notebook of a script, without outputs."""
    notebook = jupytext.read(script)
    notebook.metadata.pop("jupytext", None)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # a random one would change with each execution
    return notebook


def execute(script: Path, variables: Mapping[str, str] | None = None) -> Any:
    """Return the executed notebook of a script. variables: further environment variables

    Raises CellExecutionError for a cell that raises an error.
    """
    notebook = read(script)
    encrypted = Config(KernelManager={"transport_encryption": "auto"})  # else the kernel warns
    where = {"metadata": {"path": str(script.parent)}}
    client = nbclient.NotebookClient(
        notebook, config=encrypted, timeout=CELL_S, resources=where, record_timing=False
    )
    return client.execute(env={**os.environ, **(variables or {})})


def main() -> None:
    for script in SCRIPTS:
        notebook = execute(script)
        target = script.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
