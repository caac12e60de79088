"""Several worker processes in one test run: they build large files once, and exclusive tests run alone.

pytest-xdist starts the workers; `make test`, `make test-all` and `make ci` pass its options. Without workers, both
mechanisms here are idle: every test runs alone, and a file is built for its only user.
"""

import fcntl
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

EXCLUSIVE = "exclusive"

Build = Callable[[Path], object]  # writes a file or a directory to the path that it gets
BuiltOnce = Callable[[str, Build], Path]

FOLDER = pytest.StashKey[Path]()  # what the workers of a run share; absent without workers


def pytest_configure(config: pytest.Config) -> None:
    if worker := getattr(config, "workerinput", None):
        config.stash[FOLDER] = Path(worker["folder"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are processors, because tests wait for processes that they start."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker that the main process starts the same folder."""
    config = node.config
    if FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory(prefix="quartet-tests-")
        config.add_cleanup(folder.cleanup)
        config.stash[FOLDER] = Path(folder.name)
    node.workerinput["folder"] = str(config.stash[FOLDER])


# -- files that several tests read -------------------------------------------------------------------------------------


def build_once(path: Path, build: Build) -> Path:
    """Return a path, which the first process that calls this builds while the others wait.

    build: it writes to a path of the same name in another directory; the complete result is moved from there.
    After a build that raises, the next process builds again, and raises its own error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            built = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)) / path.name
            build(built)
            built.rename(path)
    return path


@pytest.fixture(scope="session")
def built_once(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> BuiltOnce:
    """A function of a relative path and a build: returns the path of what one worker builds for all.

    Each fixture has a path of its own. Tests of what is built skip where torch is not installed, as in `make versions`.
    """
    folder = pytestconfig.stash.get(FOLDER, None) or tmp_path_factory.getbasetemp()

    def build_or_skip(name: str, build: Build) -> Path:
        if find_spec("torch") is None:
            pytest.skip("the tests' models are built by torch, which is not installed")
        return build_once(folder / "built" / name, build)

    return build_or_skip


# -- tests that need the machine for themselves ------------------------------------------------------------------------


def is_exclusive(item: pytest.Item) -> bool:
    return item.get_closest_marker(EXCLUSIVE) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move exclusive tests to the end; a worker lists them for the main process, which collects no tests.

    With workers, files with a test that may take longer than the others, and then those of most tests, come first: a
    large file at the end would keep one worker busy alone.
    """
    items.sort(key=is_exclusive)
    if folder := config.stash.get(FOLDER, None):
        tests = Counter(item.path for item in items)
        long = {item.path for item in items if item.get_closest_marker("timeout")}
        items.sort(key=lambda item: (is_exclusive(item), item.path not in long, -tests[item.path]))
        exclusive = [item.nodeid for item in items if is_exclusive(item)]
        (folder / EXCLUSIVE).write_text(json.dumps(exclusive), encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute ordinary tests by file, to set up a module's fixtures once, and exclusive tests as one unit."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # in the order of collection

    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        @cached_property
        def exclusive(self) -> set[str]:
            return {*json.loads((config.stash[FOLDER] / EXCLUSIVE).read_text(encoding="utf-8"))}

        def _split_scope(self, nodeid: str) -> str:
            return EXCLUSIVE if nodeid in self.exclusive else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hold a lock that all workers share: an exclusive test waits until no other test runs, and the others wait for it.

    The lock covers fixtures. pytest-timeout starts inside of it, and does not count the time that a test waits here.
    """
    folder = item.config.stash.get(FOLDER, None)
    if folder is None:
        return (yield)
    with open(folder / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_exclusive(item) else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(
                file, fcntl.LOCK_UN
            )  # a process that the test forked may have the file open
