"""The live service keeps what its own description says, whatever it is sent."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
CONFIG = Path(__file__).parent / "contract.toml"
REQUESTS = int(os.environ.get("CONTRACT_REQUESTS", "15"))  # at least
EXAMPLES = REQUESTS // 3  # of each task; what covers the schemas comes on top
FOUND = re.compile(r"Test cases:\s+([\d,]+) generated, ([\d,]+) passed\s")


@pytest.mark.promise("The service responds as its OpenAPI document declares, for every input.")
@pytest.mark.timeout(3600)
def test_the_description_is_kept(tasks_bundle, tmp_path):
    """Requests made up from the OpenAPI document, good and bad, are answered as it says: statuses, types and schemas.

    None is answered 5xx, and what the document forbids is refused.
    """
    program = shutil.which("schemathesis", path=Path(sys.executable).parent)
    assert program, "schemathesis is not installed next to this Python"
    options = [
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        "1",
        "--workers",
        "1",  # CPython 3.11's `ast.parse`, which hypothesis calls, cannot be called by two threads at once
        "--continue-on-failure",
    ]
    with serving(tasks_bundle) as server:
        run = subprocess.run(
            [program, "--config-file", CONFIG, "run", f"{server.url}/openapi.json", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    said = run.stdout + run.stderr
    found = FOUND.search(said)
    assert run.returncode == 0, said
    assert found, said
    generated, passed = (int(number.replace(",", "")) for number in found.groups())
    print(f"{generated} requests, {passed} answered as described")
    assert generated == passed
    assert generated >= REQUESTS
