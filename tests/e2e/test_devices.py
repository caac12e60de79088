"""Two devices of one service, each with an inference process: groups of cores, as a CPU has them."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from service.__main__ import main
from tests import samples
from tests.e2e.conftest import children, processor_s, until
from tests.e2e.test_models import Desk, desk

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two groups need two cores"),
]

TEXTS = [samples.text(20 + number % 90, seed=number) for number in range(40)]


@pytest.fixture(scope="module")
def at(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    options = ["--devices", "cpu*2", "--hang-s", "60"]
    with desk(tiny_bundle, tmp_path_factory.mktemp("desk"), *options) as made:
        until_both_compute(made)
        yield made


@pytest.fixture(scope="module")
def expected(at: Desk) -> list[list[float]]:
    return [embed(at, text) for text in TEXTS]


def embed(at: Desk, text: str, model: str | None = None) -> list[float]:
    reply = at.server.post("/embed", {"inputs": text, "model": model}, at.client)
    assert 200 == reply.status, reply.body
    vector: list[float] = reply.json()["embeddings"][0]
    return vector


def ready(at: Desk) -> list[str]:
    """The devices that accept requests."""
    devices = at.server.send("GET", "/models", None, at.client).json()["devices"]
    return [device["name"] for device in devices if device["ready"]]


def computing(at: Desk) -> list[int]:
    """The process of each device, in their order, by its only cores."""
    return sorted(children(at.server)["inference"], key=lambda pid: min(os.sched_getaffinity(pid)))


def kill(at: Desk, device: int) -> None:
    """Kill the process of a device, and wait until it is gone; the other's requests go on."""
    pid = computing(at)[device]
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in children(at.server)["inference"])


def until_both_compute(at: Desk) -> None:
    until(lambda: len(ready(at)) == len(computing(at)) == 2, 60)


def windows(at: Desk) -> float:
    page = at.order("GET", "/metrics").body.decode()
    lines = [line for line in page.splitlines() if line.startswith("quartet_batch_size_sum")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_each_device_has_its_own_cores(at):
    first, second = map(os.sched_getaffinity, computing(at))
    assert first.isdisjoint(second)
    assert first | second == os.sched_getaffinity(0)


def test_both_devices_compute(at, expected):
    """Their results are equal, each computes a part of the requests, and the metrics count the batches of both."""
    used, computed = [processor_s(pid) for pid in computing(at)], windows(at)
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda text: embed(at, text), TEXTS * 5))
    np.testing.assert_allclose(answers, expected * 5, atol=1e-5)
    used = [processor_s(pid) - before for pid, before in zip(computing(at), used, strict=True)]
    assert min(used) > 0.2 * max(used)
    until(lambda: windows(at) >= computed + len(TEXTS) * 5)
    for line in (b'ready{device="cpu:0"} 1.0', b'queue_tokens{device="cpu:1"} 0.0'):
        until(lambda line=line: b"quartet_device_" + line in at.order("GET", "/metrics").body)


def test_all_devices_have_the_loaded_models(at):
    """A loaded model is computed by each device, also by a new process of it, and leaves all of them."""
    at.load(at.save("2", name="second"))
    (vector,) = {tuple(embed(at, TEXTS[0], "second")) for _ in range(4)}
    for device in (0, 1):
        kill(at, device)
        assert embed(at, TEXTS[0], "second") == pytest.approx(vector, abs=1e-5)
        until_both_compute(at)
    assert 200 == at.order("DELETE", "/admin/models/second@2").status
    assert 404 == at.ask("second").status


def test_a_model_that_one_device_cannot_open_is_loaded_on_none(at):
    """A further device reads the bundle after the first; here it has another version by then."""
    at.save("3")
    pid = computing(at)[1]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as clients:
        loading = clients.submit(at.order, "POST", "/admin/models", {"path": "3"})
        until(lambda: "tiny@3" in at.models())  # the first device has opened it
        shutil.rmtree(at.models_dir / "3")
        os.kill(pid, signal.SIGCONT)
        reply = loading.result(60)
    assert (422, "bad_bundle") == (reply.status, reply.json()["error"]["code"])
    until(lambda: list(at.models()) == ["tiny@1"])


@pytest.mark.promise(
    "A lost device takes only its own batches, and the others compute its requests."
)
def test_a_lost_device_loses_no_request(at, expected):
    """Each of the two is killed under load: every answer is right, and the service stays ready."""
    end, statuses = time.monotonic() + 5.0, Counter[int]()

    def ask(number: int) -> None:
        while time.monotonic() < end:
            number = (number + 1) % len(TEXTS)
            reply = at.server.post("/embed", {"inputs": TEXTS[number]}, at.client)
            statuses[reply.status] += 1
            assert reply.json()["embeddings"][0] == pytest.approx(expected[number], abs=1e-5)

    with ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(ask, 5 * number) for number in range(8)]
        for device in (1, 0):
            until_both_compute(at)
            time.sleep(0.3)
            kill(at, device)
            assert 200 == at.server.get("/health/ready").status
        for one in asking:
            one.result(60)
    assert {200} == set(statuses)
    assert statuses[200] > 50


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--devices", "cpu*99"], "devices: cpu*99: there are only"),
        (["--devices", "cpu*2", "--http-workers", "0"], "http_workers 0 has one process"),
    ],
)
def test_devices_that_cannot_be_used_end_the_start(tiny_bundle, flags, problem, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tiny_bundle), "--port", "0", *flags])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
