"""The wheel: what it contains, and that the service runs from it without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest

from service import __version__
from tests.e2e.conftest import serving

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUNDLE = "bundles/quartet-mini"

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def tracked(*folders: str) -> set[str]:
    """Return the files of these folders that Git tracks."""
    command = ["git", "ls-files", *folders]
    if not (ROOT / ".git").exists():
        pytest.skip("not a Git checkout, so the files of the packages are not known")
    return {*subprocess.check_output(command, cwd=ROOT, text=True).split()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked files, because a build leaves files in its source."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked("service", "model", "export", "quartet", BUNDLE, ":(glob)*"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", ".", *options], cwd=source, check=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel and the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    install = ["-m", "pip", "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run([python, *install], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    ours, its = (
        subprocess.check_output([each, "-c", ask], text=True).strip()
        for each in (sys.executable, python)
    )
    (Path(its) / "dependencies.pth").write_text(f"{ours}\n")
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_packages(wheel):
    """It contains each module, each data file and the default bundle, and nothing else of the repository."""
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    bundle = {f"service/default_bundle/{Path(name).name}" for name in tracked(BUNDLE)}

    assert tracked("service", "model", "export", "quartet") | bundle == files


def test_the_wheel_has_the_name_and_version_of_the_project(wheel):
    """The name is not `quartet`, which another distribution has on PyPI."""
    assert wheel.name.startswith(f"quartet_serving-{__version__}-")
    assert "quartet-serving" == PROJECT["name"]


@pytest.mark.parametrize(
    ("workers", "shadowed"),
    [("0", False), ("1", True)],
    ids=["empty folder", "folder with own modules"],
)
def test_the_service_runs_from_the_wheel(commands, tmp_path, workers, shadowed):
    """`quartet-serve` serves the default bundle, also next to modules of a user with the names of ours."""
    if shadowed:
        (tmp_path / "service").mkdir()
        for name in ("service/__init__.py", "service/__main__.py", "model.py", "export.py"):
            (tmp_path / name).write_text("raise SystemExit('a module of the user was imported')\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = [str(commands / "quartet-serve")]

    with serving("--http-workers", workers, program=program, env=env, folder=tmp_path) as server:
        answer = server.answer("/classify", {"inputs": "A warm and generous film."})
        for page in ("/", "/docs", "/static/app.js", "/static/swagger-ui-bundle.js"):
            with urllib.request.urlopen(f"{server.url}{page}", timeout=60) as response:
                assert 200 == response.status

    manifest = json.loads((ROOT / BUNDLE / "manifest.json").read_text(encoding="utf-8"))
    assert f"{manifest['name']}@{manifest['version']}" == answer["model"]
    assert {"positive", "neutral", "negative"} == {label["label"] for label in answer["results"][0]}


def test_commands_name_themselves_in_their_help(commands, tmp_path):
    """`--version` and `--help` work in a folder that holds no file of ours."""
    serve = commands / "quartet-serve"

    version = subprocess.check_output([serve, "--version"], cwd=tmp_path, text=True)
    assert f"quartet {__version__}\n" == version
    usage = subprocess.check_output([serve, "--help"], cwd=tmp_path, text=True)
    assert usage.startswith("usage: quartet-serve ")
