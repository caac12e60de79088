"""Print the requirements for pip: the dependencies in pyproject.toml, and the dependencies of the named extras.

Quartet itself runs from its checkout, so only its dependencies are installed, and pip has no option
for that. Needs nothing but Python 3.11 or newer:

    python3 deploy/requirements.py cpu > requirements.txt
    python3 deploy/requirements.py --lowest cpu > lowest.txt
    python3 deploy/requirements.py --image cpu > requirements.txt    without what only the command quartet imports
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
COMMAND_ONLY = ("argcomplete", "onnx>")  # which an image of the service alone does not need


def requirements(extras: list[str]) -> list[str]:
    """Return the base dependencies, then the dependencies of each extra. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [line for extra in extras for line in optional[extra]]


def lowest(requirement: str) -> str:
    """Return the requirement of exactly the lowest version that a requirement allows."""
    return re.sub(r">=([\w.]+)(,<[\w.]+)?", r"==\1", requirement)


if __name__ == "__main__":
    wanted = requirements([word for word in sys.argv[1:] if not word.startswith("--")])
    if "--image" in sys.argv:
        wanted = [line for line in wanted if not line.startswith(COMMAND_ONLY)]
    print(*(map(lowest, wanted) if "--lowest" in sys.argv else wanted), sep="\n")
