"""Print the requirements for pip: the dependencies in pyproject.toml, and the dependencies of the named extras.

Quartet itself runs from its checkout, so only its dependencies are installed, and pip has no option
for that. Needs nothing but Python 3.11 or newer:

    python3 deploy/requirements.py cpu > requirements.txt

With --lowest first, each requirement is the lowest version that its range allows.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Return the base dependencies, then the dependencies of each extra. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [line for extra in extras for line in optional[extra]]


def lowest(requirement: str) -> str:
    """Return a requirement of the lowest version of a range."""
    return re.sub(r">=([\w.]+)(,<[\w.]+)?", r"==\1", requirement)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--lowest"]:
        print(*map(lowest, requirements(arguments[1:])), sep="\n")
    else:
        print(*requirements(arguments), sep="\n")
