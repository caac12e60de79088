"""Each server under test is started, asked, read and ended as the table says."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib import environments, servers
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.servers import SERVERS, Server, StartError, serving
from tests import samples

TEXT = "Ada Lovelace met the board of Siemens in Berlin."
PEERS = [server for server in SERVERS if server.environment and "embed" in server.calls]

# It writes the ids of its child processes to a file, then it answers every GET.
WITH_A_CHILD = """
import http.server, pathlib, subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, process_group=0)
pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
handler = http.server.SimpleHTTPRequestHandler
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), handler).serve_forever()
"""


def scripted(script: str) -> Server:
    def command(python: Path, model: Path, port: int) -> list[str]:
        return [sys.executable, "-c", script, str(model), str(port)]

    return Server("scripted", command, calls={}, ready="/")


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_table():
    """Names are unique; every server has its environment's requirements, and at least one task."""
    assert len(SERVERS) == len({server.name for server in SERVERS})
    for server in SERVERS:
        assert server.environment in {None, *environments.names()}
        assert server.calls.keys() & {"embed", "classify", "ner"} == server.calls.keys() != set()
    assert "quartet fp32" == servers.named("quartet fp32").name
    with pytest.raises(KeyError, match="there are quartet fp32, "):
        servers.named("nobody")


def test_quartet_gets_the_requests_of_infinity(tmp_path):
    """Quartet as a replacement for infinity answers the same requests on the same path."""
    replaced, quartet = map(servers.named, ("infinity torch", "quartet fp32, infinity's API"))
    assert replaced.calls["embed"] == quartet.calls["embed"]
    command = quartet.command(Path(sys.executable), tmp_path, 1)
    assert ["--root-dialect", "infinity"] == command[-2:]


@pytest.mark.e2e
@pytest.mark.slow
def test_quartet(mini_bundle, tmp_path):
    """Quartet takes what it is asked, and its answers are read."""
    server = servers.named("quartet int8")
    with serving(server, mini_bundle, tmp_path) as (port, process, start_s):
        found = {task: servers.ask(port, call, TEXT) for task, call in server.calls.items()}
        assert process.poll() is None
        assert 0 < start_s < 60

    assert 288 == len(found["embed"])
    assert {"positive", "neutral", "negative"} == {one["label"] for one in found["classify"]}
    assert found["ner"]
    assert process.returncode is not None


@pytest.mark.e2e
def test_everything_is_ended(tmp_path):
    """All processes that a server started end with it, in every process group."""
    with serving(scripted(WITH_A_CHILD), tmp_path, tmp_path) as (_, process, _):
        child = int((tmp_path / "child").read_text())
        assert runs(child)

    end = time.monotonic() + 60
    while runs(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not runs(child)
    assert not runs(process.pid)


@pytest.mark.e2e
def test_server_that_dies(tmp_path):
    """A server that ends at start is reported with its status and what it said."""
    with (
        pytest.raises(StartError, match="ended at start with status 3: no such luck"),
        serving(scripted("import sys; print('no such luck'); sys.exit(3)"), tmp_path, tmp_path),
    ):
        pytest.fail("it started")


def test_environment_of_every_server():
    """Every server gets the usable cores, and its runtime sends no telemetry."""
    variables = servers.shared_env()
    assert 1 <= int(variables["OMP_NUM_THREADS"]) <= (os.cpu_count() or 1)
    assert "1" == variables["ORT_DISABLE_TELEMETRY"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("server", PEERS, ids=lambda server: server.name)
def test_peer_agrees(server, minilm_folder, tmp_path):
    """A peer's embeddings are sentence-transformers' own, also of a text that is cut."""
    try:
        server.python()
    except Unavailable as error:
        pytest.skip(f"{server.name}: {error}")
    texts = [samples.text(words, seed=words) for words in (5, 60, 400)]

    with serving(server, minilm_folder, tmp_path) as running:
        found = [servers.ask(running.port, server.calls["embed"], text) for text in texts]

    for expected, vector in zip(reference(texts, minilm_folder), found, strict=True):
        assert cosine(expected, vector) > 0.999


def reference(texts: list[str], folder: Path) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts, show_progress_bar=False)


def cosine(a, b) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))
