"""Models that hang or fail: the service logs the failure, replaces the process, and answers the good texts."""

import http.client
import json
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests import faulty, samples
from tests.e2e.conftest import Server, children, readiness, serving, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BAD = f"Ada drew a {faulty.WORD} at dawn."


def problem(server: Server) -> str:
    """The reason in the response of /health/ready, or an empty text."""
    reply = server.get("/health/ready")
    return "" if reply.status == 200 else reply.json()["error"]["message"]


@pytest.mark.promise("If an input hangs the model, only that input fails.")
@pytest.mark.exclusive
def test_a_text_that_hangs_fails_alone(tiny, tiny_bundle, tmp_path):
    """The service replaces the hanging process twice; the other requests in its batches are answered."""
    path = faulty.with_fault(tiny_bundle, tmp_path / "hangs", faulty.endless_loop)
    texts = [samples.text(10 + seed, seed=seed) for seed in range(8)]
    expected = tiny.answer("/embed", {"inputs": texts})["embeddings"]
    with serving(path, "--hang-s", "1") as server, ThreadPoolExecutor(9) as clients:
        (before,) = children(server)["inference"]
        bad = clients.submit(server.post, "/embed", {"inputs": BAD})
        time.sleep(0.3)  # by then it hangs
        good = [clients.submit(server.answer, "/embed", {"inputs": text}) for text in texts]
        until(lambda: readiness(server) == 503)
        assert 200 == server.get("/health/live").status
        reply = bad.result(60)
        assert (503, "replica_lost") == (reply.status, reply.json()["error"]["code"])
        for answer, vector in zip(good, expected, strict=True):
            assert vector == pytest.approx(answer.result(60)["embeddings"][0], abs=1e-5)
        until(lambda: not problem(server), 60)
        assert [before] != children(server)["inference"]
        until(lambda: 2 == sum("inference cannot go on" in line for line in server.log))
        assert not any(faulty.WORD in line for line in server.log)


@pytest.mark.exclusive
def test_a_text_that_hangs_in_one_process(tiny_bundle, tmp_path):
    """It ends with a status that says so, for a supervisor to start it again."""
    path = faulty.with_fault(tiny_bundle, tmp_path / "hangs", faulty.endless_loop)
    options = ["--http-workers", "0", "--hang-s", "1", "--deadline-ms", "2000", "--drain-s", "1"]
    with serving(path, *options) as server:
        assert 200 == server.get("/health/live").status
        with suppress(ConnectionError):
            server.post("/embed", {"inputs": BAD})
        assert 4 == server.process.wait(60)
        until(lambda: any("a batch of tiny@1 (1 texts" in line for line in server.log))


@pytest.mark.promise("A model that can no longer compute is detected without a request.")
def test_a_session_that_can_compute_nothing_is_noticed(tiny_bundle, tmp_path, limit_s):
    """Without a single request: readiness says no within a second or so, and the process is replaced."""
    path = faulty.with_fault(tiny_bundle, tmp_path / "greedy", faulty.greed)
    with serving(path) as server:
        (inference,) = children(server)["inference"]
        until(lambda: 'canary_runs_total{model="tiny@1",outcome="ok"}' in page(server))
        assert "quartet_batch_size_count" not in page(server)
        limit_memory(inference, 48)
        until(lambda: "the canary of tiny@1 failed" in problem(server), limit_s(3))
        until(lambda: inference not in children(server)["inference"])
        until(lambda: not problem(server), 60)
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})
        until(lambda: 3 == sum("the canary failed" in line for line in server.log))


def test_a_session_that_can_compute_nothing_is_noticed_under_load(tiny_bundle, tmp_path):
    """Requests that fail do not pass for work, and a single process ends with a status that says so."""
    path = faulty.with_fault(tiny_bundle, tmp_path / "greedy", faulty.greed)
    with serving(path, "--http-workers", "0") as server:
        assert server.answer("/embed", {"inputs": "Ada drew a comet."})
        limit_memory(server.process.pid, 48)
        statuses = []
        with suppress(OSError, http.client.HTTPException):
            while True:
                statuses.append(server.post("/embed", {"inputs": "Ada drew a comet."}).status)
        assert {500} == set(statuses)
        assert 4 == server.process.wait(60)
        until(lambda: any("the canary of tiny@1 failed" in line for line in server.log))


@pytest.mark.parametrize("fault", [faulty.failure, faulty.not_a_number])
def test_a_text_that_cannot_be_computed_fails_alone(tiny, tiny_bundle, tmp_path, fault):
    """The other requests are answered; the failure is counted and logged with a hash of the text, not the text."""
    path = faulty.with_fault(tiny_bundle, tmp_path / "poisoned", fault)
    texts = [samples.text(12, seed=seed) for seed in range(16)]
    texts[5] = BAD
    with serving(path) as server, ThreadPoolExecutor(16) as clients:
        replies = [*clients.map(lambda text: server.post("/embed", {"inputs": text}), texts)]
        assert [200] * 5 + [500] + [200] * 10 == [reply.status for reply in replies]
        assert "inference_failed" == replies[5].json()["error"]["code"]
        assert 'quartet_poison_inputs_total{model="tiny@1"} 1.0' in page(server)
        until(lambda: any("an input failed alone" in line for line in server.log))
        (told,) = [line for line in server.log if "an input failed alone" in line]
        assert re.search(r'"sha256":"[0-9a-f]{16}"', told)
        assert not any(faulty.WORD in line for line in server.log)
        assert not problem(server)


@pytest.mark.promise("Valid inputs are answered next to bad ones, if the request says so.")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_good_texts_are_spared_when_asked_for(tiny, tiny_bundle, tmp_path, workers):
    """Of texts that are too long, cannot be computed, or are good, the last are answered and the others named."""
    path = faulty.with_fault(tiny_bundle, tmp_path / "poisoned", faulty.failure)
    texts = [samples.text(10 + number % 7, seed=number) for number in range(60)]
    expected = tiny.answer("/ner", {"inputs": texts})["results"]
    wrong = {0: "invalid", 17: "inference_failed", 18: "inference_failed", 59: "invalid"}
    for index, code in wrong.items():
        texts[index] = BAD if code == "inference_failed" else samples.text(900, seed=index)
    body = {"inputs": texts, "truncate": False, "on_error": "null"}
    with serving(path, "--http-workers", workers) as server:
        answer = server.answer("/ner", body)
        reply = server.post("/ner", body, {"Accept": "application/x-ndjson"})
        assert 422 == server.post("/ner", {**body, "on_error": "fail"}).status
        both = server.answer("/ner", {"inputs": [BAD] * 2, "on_error": "null"})
        assert [None, None] == both["results"]
    *lines, summary = map(json.loads, reply.body.splitlines())
    for errors in (answer["errors"], summary["errors"]):
        assert wrong == {error["index"]: error["code"] for error in errors}
    by_index = {line["index"]: line["result"] for line in lines}
    assert 60 == len(lines) == len(by_index)
    for index, result in enumerate(answer["results"]):
        assert (result is None) is (by_index[index] is None) is (index in wrong)
        if index not in wrong:
            words = [found["word"] for found in expected[index]]
            assert words == [found["word"] for found in result]
            assert words == [found["word"] for found in by_index[index]]


def page(server: Server) -> str:
    return server.get("/metrics").body.decode()


def memory_pages(pid: int) -> int:
    time.sleep(0.005)
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0])


def limit_memory(pid: int, megabytes: int) -> None:
    """Limit a process to this much more memory than it has, which is less than `greed` needs."""
    pages = min(memory_pages(pid) for _ in range(100))  # between two of its canaries
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + megabytes * 1024 * 1024
    resource.prlimit(pid, resource.RLIMIT_AS, (most, hard))


@pytest.mark.promise("An inference process that sends nothing is detected within a second.")
def test_silence_is_noticed_within_a_second(tiny_bundle, pytestconfig, limit_s):
    """A stopped inference process makes the service not ready, although it is connected, until it continues."""
    with serving(tiny_bundle) as server:
        (inference,) = children(server)["inference"]
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(inference, signal.SIGSTOP)
        until(lambda: "has sent nothing" in problem(server), limit_s(1.5))
        if pytestconfig.getoption("--chaos"):
            assert 0.5 < time.monotonic() - began
        os.kill(inference, signal.SIGCONT)
        until(lambda: not problem(server))
        assert [inference] == children(server)["inference"]


@pytest.mark.promise("Load never makes readiness false.")
@pytest.mark.exclusive
def test_load_is_no_silence(tiny_bundle):
    """With every core busy and a long queue, the service is ready all the time."""
    texts = [samples.text(100 + number % 100, seed=number) for number in range(40)]
    said = []
    with serving(tiny_bundle) as server, ThreadPoolExecutor(24) as clients:
        asked = [clients.submit(server.post, "/embed", {"inputs": texts}) for _ in range(120)]
        while not all(one.done() for one in asked):
            said.append(readiness(server))
            time.sleep(0.05)
        assert {200} == {one.result().status for one in asked}
    assert len(said) > 20
    assert {200} == set(said)
