"""Clients that are generated from the OpenAPI document: without a warning, well typed, and right on a live server."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.test_models import desk
from tests.workers import BuiltOnce

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

FILES = Path(__file__).parent / "generated"
MODELS = [
    *("--input-file-type", "openapi", "--output-model-type", "pydantic_v2.BaseModel"),
    *("--use-annotated", "--set-default-enum-member", "--formatters", "builtin"),
]


@pytest.fixture(scope="module")
def python(built_once: BuiltOnce) -> Path:
    """The interpreter of an environment with the generators."""

    def install(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        command = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-input"]
        requirements = ["--requirement", FILES / "requirements.txt"]
        ended = subprocess.run(
            [*command, *requirements], capture_output=True, text=True, check=False
        )
        if ended.returncode:
            pytest.skip(f"the generators cannot be installed: {ended.stderr.strip()[-300:]}")

    return built_once("environments/generators", install) / "bin" / "python"


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints, which must succeed."""
    paths = [str(folder / "client"), str(folder), os.environ["PATH"]]
    environment = {**os.environ, "PATH": f"{Path(command[0]).parent}:{paths[-1]}"}
    environment |= {"PYTHONPATH": ":".join(paths[:2]), "MYPYPATH": ":".join(paths[:2])}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert 0 == ended.returncode, ended.stdout
    return ended.stdout


def test_generated_clients_work(python, tiny_bundle, masked_bundle, tmp_path):
    """Both generators read the whole document, mypy finds no error, and every native operation succeeds."""
    (tmp_path / "server").mkdir()
    with desk(tiny_bundle, tmp_path / "server", others=[masked_bundle]) as at:
        with urllib.request.urlopen(f"{at.server.url}/openapi.json") as answer:
            document = json.load(answer)
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        generate = ["generate", "--path", "openapi.json", "--output-path", "client"]
        printed = run(python, "-m", "openapi_python_client", *generate, folder=tmp_path)
        assert ["Generating client"] == printed.split("\n")[:-1]
        module = ["--input", "openapi.json", "--output", "quartet_models.py", *MODELS]
        assert "" == run(python, "-m", "datamodel_code_generator", *module, folder=tmp_path)

        shutil.copy(FILES / "calls.py", tmp_path)
        # The generator casts a list of anything to itself.
        options = ["--strict", "--no-warn-redundant-casts"]
        checked = [*options, "quartet_models.py", "client/quartet_client", "calls.py"]
        run(python, "-m", "mypy", *checked, folder=tmp_path)

        operations = {
            operation["operationId"]
            for path in document["paths"].values()
            for operation in path.values()
            if {*operation["tags"]} <= {"tasks", "service", "administration"}
        }
        called = re.findall(r"(\w+)\.sync\(", (FILES / "calls.py").read_text())
        assert operations <= {"models" if name == "served" else name for name in called}
        at.save("2")
        keys = [headers["Authorization"].split()[1] for headers in (at.client, at.admin)]
        run(python, "calls.py", at.server.url, *keys, folder=tmp_path)
