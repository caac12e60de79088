"""Prints what pip has to install: the dependencies in pyproject.toml and those of the extras named.

Quartet itself runs from its checkout, so only its dependencies are installed, and pip has no option
for that. Needs nothing but Python 3.11 or newer:

    python3 deploy/requirements.py cpu > requirements.txt
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """The base dependencies, then those of each extra. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [line for extra in extras for line in optional[extra]]


if __name__ == "__main__":
    print(*requirements(sys.argv[1:]), sep="\n")
