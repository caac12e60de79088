"""Quartet on a local cluster of Ray: `make cluster` runs these tests in an environment with Ray."""

import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="the extra ray is absent; `make cluster` installs it")
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from quartet.ray_serve import Options, build  # noqa: E402
from tests.versions import restate  # noqa: E402

ROOT = Path(__file__).parents[2]
PORT = 8455
URL = f"http://127.0.0.1:{PORT}"
NODES = 3

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def cluster():
    """Three nodes on this machine, with a proxy on the first."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(NODES - 1)]
    ray.init(
        address=cluster.address,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        log_to_driver=False,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    yield cluster, nodes
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def models(tmp_path):
    """The default bundle as versions 6 and 7, in a directory of models."""
    source = ROOT / "bundles" / "quartet-mini"
    for version in ("6", "7"):
        copy = shutil.copytree(source, tmp_path / f"mini-{version}")
        restate(copy, version=version)
    return tmp_path


def run(models, user_config=None, **options):
    """Serve version 6, and wait until it answers."""
    own = Options(bundles=(str(models / "mini-6"),), models_dir=str(models), **options)
    app = build(own)
    if user_config is not None:
        app._bound_deployment = app._bound_deployment.options(user_config=user_config)
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
    """Clients that send requests without a pause until the block ends."""

    def __init__(self, number, text):
        self.answers, self.errors = 0, []
        self._text = text
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(number)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        for thread in self._threads:
            thread.join()

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


def until(true, seconds=180):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_load_and_faults(cluster, models):
    """Replicas follow the expected wait; a change of models loses nothing, a killed replica only its own requests."""
    run(models, {"models": []}, min_replicas=1, max_replicas=2, wait_s=0.05)
    assert "quartet-mini@6" == classify()["model"]

    with Clients(16, "a text " * 60) as clients:
        until(lambda: replicas() == 2)
        run(models, {"models": ["mini-7"]}, min_replicas=1, max_replicas=2, wait_s=0.05)
        until(lambda: classify()["model"] == "quartet-mini@7")
    assert clients.answers > 16
    assert [] == clients.errors
    assert "quartet-mini@6" == classify(model="quartet-mini@6")["model"]

    pids = {ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in actors()}
    with Clients(8, "a text") as clients:
        until(lambda: clients.answers > 20)
        os.kill(pids.pop(), signal.SIGKILL)
        after = clients.answers
        until(lambda: clients.answers > after + 50)
    assert len(clients.errors) <= 3 * 8  # those it had, and those of the time until HAProxy knew
    until(lambda: replicas() == 1)
    assert "quartet-mini@7" == classify()["model"]


def actors():
    """The replicas of the deployment, as Ray's actors."""
    names = [
        name
        for name in ray.util.list_named_actors(all_namespaces=True)
        if "Quartet" in name["name"]
    ]
    return [ray.get_actor(name["name"], name["namespace"]) for name in names]
