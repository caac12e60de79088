"""A service whose cgroup has too little memory, in a real cgroup."""

import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from service.settings import cgroup_directories
from tests.e2e.conftest import start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_MIB = 150  # of which the main process and one HTTP process take two thirds


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of v1 or v2 with a memory limit, which processes can enter."""
    for parent in cgroup_directories(Path("/"), "memory"):
        path = parent / f"quartet-test-{os.getpid()}"
        names = {"memory.limit_in_bytes", "memory.max"}
        try:
            path.mkdir()
            (limit,) = names & set(os.listdir(path))
            (path / limit).write_text(str(LIMIT_MIB * 2**20))
        except (OSError, ValueError):
            with suppress(OSError):
                path.rmdir()
            continue
        yield path
        for _ in range(100):  # until the last process has left
            with suppress(OSError):
                path.rmdir()
                return
            time.sleep(0.1)
        return
    pytest.skip("no cgroup with a memory limit can be made here")


def test_a_service_without_memory_says_so(mini_bundle, cgroup, tmp_path):
    """Each kill of its inference process, which is started again, is reported with limit and peak.

    The bundle does not state its memory: the service refuses to start one that does.
    """
    silent = shutil.copytree(mini_bundle, tmp_path / mini_bundle.name)
    manifest = json.loads((silent / "manifest.json").read_text(encoding="utf-8"))
    for graph in manifest["graphs"]:
        del graph["memory"]
    (silent / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    enter = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh"]
    process = start(silent, "--port", "0", "--http-workers", "1", under=enter)
    assert process.stderr is not None
    with process, process.stderr as log:
        ended = (json.loads(line) for line in log if "the inference process ended" in line)
        for line in itertools.islice(ended, 2):
            assert line["problem"].startswith(f"out of memory: limit {LIMIT_MIB} MiB, peak ")
            assert "status" not in line
        process.terminate()
        assert 0 == process.wait(60)
