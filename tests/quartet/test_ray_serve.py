"""Quartet on a local cluster of Ray: `make cluster` runs these tests in an environment with Ray."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="the extra ray is absent; `make cluster` installs it")
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from benchmarks.lib import processes  # noqa: E402
from quartet.ray_serve import Options, build  # noqa: E402
from tests.versions import restate  # noqa: E402

ROOT = Path(__file__).parents[2]
PORT = 8455
URL = f"http://127.0.0.1:{PORT}"
NODES = 3
CLIENTS = 8
CPUS = 2  # of a node, and of a replica

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def cluster():
    """Three nodes on this machine: a head with the proxy, and two with a replica each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=CPUS)
    ray.init(
        address=cluster.address,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        log_to_driver=False,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The default bundle as versions 6 and 7, in a directory of models."""
    source, folder = ROOT / "bundles" / "quartet-mini", tmp_path_factory.mktemp("models")
    for version in ("6", "7"):
        copy = shutil.copytree(source, folder / f"mini-{version}")
        restate(copy, version=version)
    return folder


def run(models, replicas=2, loaded=(), **options):
    """Serve version 6 with this many replicas, and the bundles of the user config; wait until they answer."""
    own = Options(
        bundles=(str(models / "mini-6"),),
        models_dir=str(models),
        cpus=CPUS,
        **{"min_replicas": replicas, "max_replicas": replicas, **options},
    )
    app = build(own)
    app._bound_deployment = app._bound_deployment.options(user_config={"models": [*loaded]})
    serve.run(app, route_prefix="/")


def classify(text="It was worth the wait.", model=None):
    body = json.dumps({"inputs": text, "model": model, "top_k": 1}).encode()
    request = urllib.request.Request(f"{URL}/classify", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{error.code}: {error.read(500)!r}") from None


class Clients:
    """Clients that send requests without a pause until the block ends, and then print what was lost.

    errors: requests without an answer, and answers that are no result; a refusal (429) is neither
    """

    def __init__(self, what, number=CLIENTS, text="a text"):
        self.answers, self.errors = 0, []
        self._what, self._text = what, text
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(number)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.wait(20)
        return self

    def __exit__(self, *_):
        self._ended.set()
        for thread in self._threads:
            thread.join()
        kinds = Counter(error[:80] for error in self.errors)
        print(f"\n{self._what}: {self.answers} answers, {len(self.errors)} lost {dict(kinds)}")

    def wait(self, answers):
        """Wait for this many further answers."""
        goal = self.answers + answers
        until(lambda: self.answers >= goal)

    def _send(self):
        while not self._ended.is_set():
            try:
                [[best]] = classify(self._text)["results"]
                assert best["label"]
                self.answers += 1
            except OSError as error:
                if not str(error).startswith("429"):  # a refusal, after which a client tries again
                    self.errors.append(str(error))


def replicas():
    states = serve.status().applications["default"].deployments["Quartet"].replica_states
    return states.get("RUNNING", 0)


def actors():
    """The process and the node of each replica."""

    def place(_):
        return os.getpid(), ray.get_runtime_context().get_node_id()

    names = [
        name
        for name in ray.util.list_named_actors(all_namespaces=True)
        if "Quartet" in name["name"]
    ]
    handles = [ray.get_actor(name["name"], name["namespace"]) for name in names]
    return dict(ray.get([handle.__ray_call__.remote(place) for handle in handles]))


def until(true, seconds=180):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_scaling_loses_nothing(cluster, models):
    """Replicas follow the expected wait, up and down, and no request is lost."""
    run(models, min_replicas=1, max_replicas=2, wait_s=0.05)
    assert "quartet-mini@6" == classify()["model"]
    with Clients("scaling up", 16, "a text " * 60) as clients:
        until(lambda: replicas() == 2)
        clients.wait(50)
    assert [] == clients.errors
    with Clients("scaling down", 1) as clients:
        until(lambda: replicas() == 1)
        clients.wait(50)
    assert [] == clients.errors


def test_updates_lose_nothing(cluster, models):
    """A change of models, and of settings by a rolling update, lose no request."""
    run(models)
    with Clients("change of models") as clients:
        run(models, loaded=["mini-7"])
        clients.wait(50)
    assert [] == clients.errors
    assert "quartet-mini@7" == classify()["model"]
    assert "quartet-mini@6" == classify(model="quartet-mini@6")["model"]

    before = {*actors()}
    with Clients("rolling update") as clients:
        run(models, loaded=["mini-7"], settings={"max_wait_ms": 1})
        until(lambda: replicas() == 2 and before.isdisjoint(actors()))
        clients.wait(50)
    assert [] == clients.errors


def test_killed_replica(cluster, models):
    """HAProxy sends the requests of a killed replica to another one, but for one that it sent in part."""
    run(models)
    before = {*actors()}
    with Clients("killed replica") as clients:
        os.kill(min(before), signal.SIGKILL)
        clients.wait(100)
        until(lambda: replicas() == 2 and before != {*actors()})
        clients.wait(50)
    assert len(clients.errors) <= CLIENTS / 2


def test_killed_node(cluster, models):
    """The requests of a node whose processes are all killed go to the other node; a new node gets a replica."""
    run(models)
    places = actors()
    assert 2 == len({*places.values()})
    node = cluster.worker_nodes.copy().pop()
    with Clients("killed node") as clients:
        kill(node)
        cluster.remove_node(node, allow_graceful=False)
        clients.wait(100)
        until(lambda: replicas() == 1)
        cluster.add_node(num_cpus=CPUS)
        until(lambda: replicas() == 2 and len({*actors().values()} - {*places.values()}) == 1)
        clients.wait(50)
    assert len(clients.errors) <= CLIENTS / 2


def kill(node):
    """Kill all processes of a node at once, as if its machine had stopped."""
    roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
    pids = [pid for root in roots for pid, _ in processes.members(root)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
