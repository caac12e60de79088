"""A service whose cgroup has little memory, in a real cgroup."""

import itertools
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from service.engines.memory_limit import MemoryLimit, read_kills
from service.settings import cgroup_directories
from tests import samples
from tests.e2e.conftest import serving, start
from tests.json_files import editing

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_MIB = 150  # of which the main process and one HTTP process take two thirds
FLOOD_S = 30.0
CLIENTS = 24
NEED = re.compile(r'"need": ?"(\d+) MiB"')


@pytest.fixture
def cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cgroup of v1 or v2 with a memory limit in MiB, the parameter, which processes can enter."""
    for parent in cgroup_directories(Path("/"), "memory"):
        path = parent / f"quartet-test-{os.getpid()}"
        names = {"memory.limit_in_bytes", "memory.max"}
        try:
            path.mkdir()
            (limit,) = names & set(os.listdir(path))
            (path / limit).write_text(str(request.param * 2**20))
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


def enter(cgroup: Path) -> list[str]:
    """The command that runs another one in a cgroup."""
    return ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh"]


@pytest.mark.parametrize("cgroup", [LIMIT_MIB], indirect=True)
def test_a_service_without_memory_says_so(mini_bundle, cgroup, tmp_path):
    """Each kill of its inference process, which is started again, is reported with limit and peak.

    The bundle does not state its memory: the service refuses to start one that does.
    """
    silent = shutil.copytree(mini_bundle, tmp_path / mini_bundle.name)
    with editing(silent / "manifest.json") as manifest:
        for graph in manifest["graphs"]:
            del graph["memory"]
    process = start(silent, "--port", "0", "--http-workers", "1", under=enter(cgroup))
    assert process.stderr is not None
    with process, process.stderr as log:
        ended = (json.loads(line) for line in log if "the inference process ended" in line)
        for line in itertools.islice(ended, 2):
            assert line["problem"].startswith(f"out of memory: limit {LIMIT_MIB} MiB, peak ")
            assert "status" not in line
        process.terminate()
        assert 0 == process.wait(60)


@pytest.mark.nightly
@pytest.mark.exclusive
@pytest.mark.parametrize(("cgroup", "cores"), [(512, "0-1"), (300, "0")], indirect=["cgroup"])
def test_a_flood_of_large_batches_stays_within_the_limit(mini_bundle, cgroup, cores):
    """No process is killed while 24 clients send 64 texts of up to 230 words, and the stated need is near the peak."""
    texts = [samples.text(1 + number % 230, seed=number) for number in range(4600)]
    end = time.monotonic() + FLOOD_S

    def send(server, seed):
        rng = random.Random(seed)
        statuses = set()
        while time.monotonic() < end:
            reply = server.post("/embed", {"inputs": rng.choices(texts, k=64)})
            statuses.add(reply.status)
        return statuses

    # Batches as large as on a fast machine, and time for late answers on a slow one.
    options = ("--max-batch-ms", "20000", "--deadline-ms", "50000", "--drain-s", "1")
    under = ["taskset", "-c", cores, *enter(cgroup)]
    with serving(mini_bundle, *options, under=under) as server:
        with ThreadPoolExecutor(CLIENTS) as clients:
            statuses = set().union(*clients.map(partial(send, server), range(CLIENTS)))
        assert server.get("/health/ready").status == 200
    assert {200} <= statuses <= {200, 429}
    assert [0] == [*read_kills(cgroup)]
    need = next(int(found[1]) for line in server.log if (found := NEED.search(line)))
    peak = MemoryLimit(0, cgroup).peak
    assert peak is not None
    assert peak <= need * 2**20 <= 1.5 * peak
