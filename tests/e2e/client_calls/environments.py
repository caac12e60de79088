"""The environments of clients whose dependencies are too many, or too old, to install them next to the tests.

    python -m tests.e2e.client_calls.environments

builds those that are missing or out of date under `build/clients`, from `environments/NAME.txt`. `make test-all` and
`make clients` run it.
"""

import sys
from pathlib import Path

from benchmarks.lib.environments import ROOT, Environment, build_all

REQUIREMENTS = Path(__file__).parent / "environments"
BUILT = ROOT / "build" / "clients"
COMMAND = "python -m tests.e2e.client_calls.environments"


def names() -> list[str]:
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def environment(name: str) -> Environment:
    return Environment(REQUIREMENTS / f"{name}.txt", BUILT / name, COMMAND)


if __name__ == "__main__":
    sys.exit(not build_all(map(environment, names())))
