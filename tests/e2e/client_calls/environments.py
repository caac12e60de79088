"""The environments of clients whose dependencies are too many, or too old, to install them next to the tests.

    python -m tests.e2e.client_calls.environments

builds those that are missing or out of date under `build/clients`, from `environments/NAME.txt`, and unpacks OpenAI's
JavaScript client next to them where npm is installed. `make test-all` and `make clients` run it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.lib.environments import ROOT, Environment, build_all

REQUIREMENTS = Path(__file__).parent / "environments"
BUILT = ROOT / "build" / "clients"
COMMAND = "python -m tests.e2e.client_calls.environments"


JAVASCRIPT = BUILT / "openai-6.49.0"


def unpack_javascript() -> None:
    """Unpack OpenAI's JavaScript client to `JAVASCRIPT/package`, where a page can import its modules."""
    if (JAVASCRIPT / "package").exists() or not shutil.which("npm"):
        return
    JAVASCRIPT.mkdir(parents=True, exist_ok=True)
    name = JAVASCRIPT.name.replace("-", "@")
    subprocess.run(["npm", "pack", "--silent", name], cwd=JAVASCRIPT, check=True)
    shutil.unpack_archive(JAVASCRIPT / f"{JAVASCRIPT.name}.tgz", JAVASCRIPT)


def names() -> list[str]:
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def environment(name: str) -> Environment:
    return Environment(REQUIREMENTS / f"{name}.txt", BUILT / name, COMMAND)


if __name__ == "__main__":
    unpack_javascript()
    sys.exit(not build_all(map(environment, names())))
