"""Workers of one test run build files once, and exclusive tests run alone, after all others."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workers import build_once

ROOT = Path(__file__).parent.parent
COMMON = """
import json, os, time
from pathlib import Path
import pytest

pytest_plugins = ["tests.workers"]
LOG = Path(__file__).with_name("log")

def log(*event):
    with LOG.open("a") as file:
        file.write(json.dumps([*event, os.getpid()]) + "\\n")

@pytest.fixture(autouse=True)
def _logged(request):
    log("begin", request.node.originalname)
    yield
    log("end", request.node.originalname)

@pytest.fixture(scope="session")
def built(built_once):
    def build(path):
        log("build", path.name)
        path.write_text("content")
    return built_once("folder/name", build)

@pytest.fixture(scope="session")
def broken(built_once):
    def build(path):
        path.mkdir()
        raise ValueError("the build fails")
    return built_once("broken", build)
"""
# The exclusive test of the first file waits for the ordinary one of the second, longer than its own time limit.
FILES = {
    "test_1.py": """
import pytest

@pytest.mark.exclusive
@pytest.mark.timeout(2)
def test_exclusive(built):
    assert "content" == built.read_text()

def test_ordinary(built):
    assert "content" == built.read_text()

def test_broken(broken):
    pass
""",
    "test_2.py": """
import time
import pytest

def test_ordinary(built):
    time.sleep(3)
    assert "content" == built.read_text()

def test_broken(broken):
    pass

@pytest.mark.exclusive
def test_exclusive():
    pass
""",
}
WORKERS = ["-p", "xdist", "--numprocesses", "2", "--dist", "loadfile"]
INI = "[pytest]\nmarkers =\n    exclusive: alone\n"


@dataclass(frozen=True)
class Ended:
    """A run of pytest on these files: what it printed, and what the tests logged (event, name, process)."""

    processes: int
    output: str
    events: list[list[str]]


@pytest.fixture(scope="module", params=[WORKERS, []], ids=["workers", "one process"])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("suite")
    for name, text in {"conftest.py": COMMON, "pytest.ini": INI, **FILES}.items():
        (folder / name).write_text(text)
    options = [*request.param, "-p", "pytest_timeout", f"--basetemp={folder / 'base'}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    processes = 2 if request.param else 1
    return Ended(
        processes, run.stdout, [*map(json.loads, (folder / "log").read_text().splitlines())]
    )


def test_exclusive_tests_run_alone_at_the_end(ended: Ended) -> None:
    """No other test runs from the begin to the end of an exclusive one, and one process runs them all."""
    assert "4 passed" in ended.output
    tests = [event for event in ended.events if event[0] != "build"]
    ordinary, last = tests[:-4], tests[-4:]
    assert {"test_ordinary"} == {name for _, name, _ in ordinary}
    assert {"test_exclusive"} == {name for _, name, _ in last}
    assert ["begin", "end"] * 2 == [event for event, *_ in last]
    assert 1 == len({process for *_, process in last})


def test_files_are_built_once(ended: Ended) -> None:
    """All workers use a file that one of them built; where the build raises, each reports its error."""
    assert [["build", "name"]] == [event[:2] for event in ended.events if event[0] == "build"]
    assert 2 == ended.output.count("\nE       ValueError: the build fails")
    assert ended.processes == len({process for *_, process in ended.events})


def test_a_build_that_raises_leaves_nothing_at_its_path(tmp_path: Path) -> None:
    """The next call builds again."""

    def fail(path: Path) -> None:
        path.write_text("half of it")
        raise ValueError("the build fails")

    with pytest.raises(ValueError, match="the build fails"):
        build_once(tmp_path / "file", fail)
    assert not (tmp_path / "file").exists()
    path = build_once(tmp_path / "file", lambda path: path.write_text("all of it"))
    assert tmp_path / "file" == build_once(path, fail)
    assert "all of it" == path.read_text()
