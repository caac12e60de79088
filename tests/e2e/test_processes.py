"""HTTP and inference in separate processes: a process that dies is replaced, and all end together."""

import os
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests import samples
from tests.e2e.conftest import (
    SLOWLY,
    Server,
    children,
    kill_inference,
    queued,
    readiness,
    serving,
    start,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.promise("A dead process is detected within a second, logged, and replaced.")
def test_a_killed_inference_process_is_replaced(tiny_bundle, limit_s):
    """HTTP lives on: readiness says no at once, requests fail by name, and soon all is as before."""
    body = {"inputs": ["Ada drew a comet."]}
    with serving(tiny_bundle) as server:
        before = server.answer("/embed", body)
        (inference,), (http,) = children(server).values()
        os.kill(inference, signal.SIGKILL)
        until(lambda: readiness(server) == 503, limit_s(1))
        refused = server.post("/embed", body)
        assert (503, "replica_lost") == (refused.status, refused.json()["error"]["code"])
        assert int(refused.headers["retry-after"]) >= 1
        assert 200 == server.get("/health/live").status
        until(lambda: readiness(server) == 200, 60)
        assert before == server.answer("/embed", body)
        assert [http] == children(server)["http"]
        page = server.get("/metrics").body.decode()
        assert 'quartet_requests_rejected_total{reason="replica_lost"} 1.0' in page


def held(server: Server) -> bool:
    """Whether anything waits in the queue."""
    return bool(re.search(rb"quartet_queue_tokens [1-9]", server.get("/metrics").body))


@pytest.mark.promise("Requests of a dead inference process are computed again, once.")
def test_requests_under_way_are_asked_again(tiny, tiny_bundle):
    """The successor answers the requests of a dead process; clients only see a longer response time."""
    texts = [samples.text(60, seed=seed) for seed in range(4)]
    bodies = [{"inputs": text} for text in texts]
    expected_ones = tiny.answer("/embed", {"inputs": texts})
    tokens = expected_ones["usage"]["tokens"]
    with serving(tiny_bundle, "--max-wait-ms", "20000") as server, ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(server.answer, "/embed", body) for body in bodies]
        until(lambda: queued(server) == tokens)
        (inference,) = children(server)["inference"]
        os.kill(inference, signal.SIGKILL)
        answers = [one.result(60) for one in asked]
    for answer, expected in zip(answers, expected_ones["embeddings"], strict=True):
        assert answer["embeddings"][0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.promise(
    "A request that is lost twice fails with its own error code, and no other request fails."
)
def test_what_is_lost_twice_fails_by_name(tiny_bundle):
    """A request has two attempts; after them it fails, and the service continues."""
    body = {"inputs": [samples.text(60 + number % 40, seed=number) for number in range(1000)]}
    with serving(tiny_bundle, *SLOWLY) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.post, "/embed", body)
        for _ in range(2):
            until(lambda: readiness(server) == 200 and held(server), 60)
            kill_inference(server)
        reply = asked.result(30)
        assert (503, "replica_lost") == (reply.status, reply.json()["error"]["code"])
        assert int(reply.headers["retry-after"]) >= 1
        until(lambda: readiness(server) == 200, 60)
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})


def test_a_deadline_holds_without_an_inference_process(tiny_bundle):
    """A request that waits for a successor waits no longer than its deadline; here no successor comes."""
    body, patience = {"inputs": "Ada drew a comet."}, {"X-Request-Timeout-Ms": "4000"}
    with serving(tiny_bundle, "--max-wait-ms", "20000") as server, ThreadPoolExecutor(1) as clients:
        (inference,) = children(server)["inference"]
        asked = clients.submit(server.post, "/embed", body, patience)
        until(lambda: held(server))
        os.kill(
            server.process.pid, signal.SIGSTOP
        )  # the main process, which would start the successor
        try:
            os.kill(inference, signal.SIGKILL)
            reply = asked.result(30)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
    assert (504, "deadline_exceeded") == (reply.status, reply.json()["error"]["code"])


def test_a_drain_answers_requests_of_a_dead_process(tiny_bundle):
    """Inference is started again while the service drains, for what was accepted is to be answered."""
    body = {"inputs": samples.text(60, seed=1)}
    with serving(tiny_bundle, "--max-wait-ms", "20000") as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.post, "/embed", body)
        until(lambda: held(server))
        (inference,) = children(server)["inference"]
        os.kill(inference, signal.SIGSTOP)  # so that the drain begins before it is lost
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any('"draining"' in line for line in server.log))
        os.kill(inference, signal.SIGKILL)
        assert 200 == asked.result(60).status
        assert 0 == server.process.wait(40)


@pytest.mark.promise("A process that hangs is replaced like a dead one.")
@pytest.mark.exclusive
def test_a_stopped_inference_process_is_replaced(tiny, tiny_bundle):
    """A process that does nothing is killed after `hang_s`; its successor answers its requests."""
    body = {"inputs": samples.text(60, seed=1)}
    options = ["--hang-s", "1", "--max-wait-ms", "20000"]
    with serving(tiny_bundle, *options) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.answer, "/embed", body)
        until(lambda: held(server))
        (inference,), (http,) = children(server).values()
        os.kill(inference, signal.SIGSTOP)
        answer = asked.result(60)
        assert [inference] != children(server)["inference"]
        assert [http] == children(server)["http"]
        until(lambda: any("the inference process hangs" in line for line in server.log))
    (expected,) = tiny.answer("/embed", body)["embeddings"]
    assert expected == pytest.approx(answer["embeddings"][0], abs=1e-5)


@pytest.mark.promise("An HTTP process that hangs is replaced.")
@pytest.mark.exclusive
def test_a_stopped_http_process_is_replaced(tiny_bundle):
    """The listener stays open: the successor answers a client that connects meanwhile."""
    with serving(tiny_bundle, "--hang-s", "1") as server:
        (inference,), (http,) = children(server).values()
        os.kill(http, signal.SIGSTOP)
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})
        assert http not in children(server)["http"]
        assert [inference] == children(server)["inference"]


def test_time_of_a_suspended_machine_does_not_count(tiny_bundle):
    """When all stood still, and the children wake up after the main process, none is killed."""
    with serving(tiny_bundle, "--hang-s", "5") as server:
        before = children(server)
        pids = [server.process.pid, *(pid for found in before.values() for pid in found)]
        for pid in reversed(pids):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        time.sleep(1)
        assert before == children(server)
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})


def test_several_http_processes_share_one_inference_process(tiny_bundle):
    """All answer alike, one page counts for all, and one that dies is replaced."""
    texts = [samples.text(20, seed=seed) for seed in range(60)]
    with serving(tiny_bundle, "--http-workers", "3") as server:
        until(lambda: sum('"serving"' in line for line in server.log) == 3, 60)
        found = children(server)
        assert (1, 3) == (len(found["inference"]), len(found["http"]))
        with ThreadPoolExecutor(12) as clients:
            replies = [*clients.map(lambda text: server.post("/embed", {"inputs": text}), texts)]
            os.kill(found["http"][0], signal.SIGKILL)
            until(lambda: sum('"serving"' in line for line in server.log) == 4, 60)
            replies += clients.map(lambda text: server.post("/embed", {"inputs": text}), texts)
        assert {200: 120} == Counter(reply.status for reply in replies)
        page = server.get("/metrics").body.decode()
        count = re.search(r'_duration_seconds_count\{[^}]*route="/embed"[^}]*\} (\S+)', page)
        assert count
        assert 0 < float(count[1]) <= 120  # the last quarter second of the killed one is lost
        assert 3 == len(children(server)["http"])


def test_a_signal_to_all_at_once_is_a_drain(tiny_bundle):
    """An init system may signal every process: the children wait for the main one, and nothing is lost."""
    statuses = []
    with serving(tiny_bundle, *SLOWLY) as server:
        pids = [pid for found in children(server).values() for pid in found]
        body = {"inputs": [samples.text(200, seed=seed) for seed in range(100)]}
        with ThreadPoolExecutor(8) as clients:
            asked = [clients.submit(server.post, "/embed", body) for _ in range(8)]
            until(lambda: held(server))
            for pid in [*pids, server.process.pid]:
                os.kill(pid, signal.SIGTERM)
            statuses += [one.result(60).status for one in asked]
        assert 0 == server.process.wait(40)
    assert [200] * 8 == statuses


def test_what_cannot_be_opened_again_is_tried_again(tiny_bundle, tmp_path):
    """A service that has served does not end while its bundle is missing: it logs this, and tries again."""
    path, away = shutil.copytree(tiny_bundle, tmp_path / "tiny"), tmp_path / "away"
    with serving(path) as server:
        path.rename(away)
        (inference,) = children(server)["inference"]
        os.kill(inference, signal.SIGKILL)
        until(lambda: sum('"status":3,' in line for line in server.log) >= 2, 60)
        assert 503 == readiness(server)
        assert 200 == server.get("/health/live").status
        away.rename(path)
        until(lambda: readiness(server) == 200, 60)
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})
        until(lambda: any("cannot start" in line for line in server.log))


def test_a_scrape_has_the_requests_of_every_process(tiny_bundle):
    """Series begin with the first request, in the process that answers it."""
    count = 'quartet_request_duration_seconds_count{model="tiny@1",route="/embed",status="200"}'
    stage = 'quartet_stage_seconds_count{stage="serialise"}'
    with serving(tiny_bundle, "--http-workers", "2") as server:

        def told(times):
            page = server.get("/metrics").body.decode()
            return all(f"{name} {times}.0" in page for name in (count, stage))

        assert 'model="tiny@1",route' not in server.get("/metrics").body.decode()
        for number in range(4):
            server.answer("/embed", {"inputs": samples.text(20, seed=number)})
        until(lambda: told(4))  # what the other process saw is pushed every quarter second


def wait_ready(server: Server) -> None:
    until(lambda: readiness(server) == 200, 60)


@pytest.mark.promise(
    "A flood of connections blocks neither health checks nor a new inference process."
)
def test_a_flood_of_connections(tiny_bundle):
    """While it lasts, probes are answered, and an inference process that is lost is replaced and connected."""
    flooding = threading.Event()
    flooding.set()

    def flood(port):
        mine = deque()
        while flooding.is_set():
            with suppress(OSError):
                mine.append(socket.create_connection(("127.0.0.1", port), timeout=2))
            if len(mine) > 400:
                mine.popleft().close()
            time.sleep(0.0005)  # or it would take a core from the service
        for connection in mine:
            connection.close()

    few_files = ["sh", "-c", 'ulimit -n 330; exec "$@"', "sh"]
    with (
        serving(tiny_bundle, "--max-connections", "20", under=few_files) as server,
        ThreadPoolExecutor(2) as clients,
    ):
        (before,) = children(server)["inference"]
        floods = [clients.submit(flood, server.port) for _ in range(2)]
        try:
            time.sleep(1)
            assert [200] * 10 == [server.get("/health/live").status for _ in range(10)]
            os.kill(before, signal.SIGKILL)
            until(lambda: children(server)["inference"] not in ([], [before]), 60)
            wait_ready(server)
        finally:
            flooding.clear()
        for each in floods:
            each.result(60)
        wait_ready(server)
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})


@pytest.mark.parametrize(
    ("workers", "closed"),
    [("1", "0<&-"), ("1", "1>&-"), ("1", "2>&-"), ("1", "0<&- 1>&- 2>&-"), ("0", "0<&- 1>&- 2>&-")],
)
def test_a_start_without_standard_descriptors(tiny_bundle, closed, workers):
    """A daemon may start the service with any of them closed: it serves, and drains."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    arguments = (tiny_bundle, "--port", str(port), "--http-workers", workers)
    process = start(*arguments, under=shell)
    server = Server(process, f"http://127.0.0.1:{port}")
    assert process.stderr is not None
    try:
        until(lambda: readiness(server) == 200, 60)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
