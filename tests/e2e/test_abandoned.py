"""Clients that give up: their requests are dropped at once, by what the log, the queue and the processor show."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from tests import samples
from tests.e2e.conftest import Server, children, processor_s, queued, until

pytestmark = pytest.mark.e2e

DROPPED_S = 0.1  # after a client has left, its request is dropped
HEADERS = {"Content-Type": "application/json"}
WORK = json.dumps({"inputs": [samples.text(50, seed=n) for n in range(400)], "dimensions": 2})
SOME_KIB = (0, 220, 300, 5000)  # below, around and above the buffers of a connection
FURTHER_KIB = (170, 200, 240, 400, 600, 1500)
KIB = (*SOME_KIB, *(pytest.param(kib, marks=pytest.mark.nightly) for kib in FURTHER_KIB))


def body_of(kib: int) -> bytes:
    """The same work in a body of at least this size: blanks after the JSON."""
    return WORK.encode().ljust(kib * 1024)


@dataclass
class Watch:
    """Reads off one server what a request costs and when it is dropped."""

    server: Server

    def processor_s(self) -> float:
        """Seconds of processor time that the inference process has taken."""
        (inference,) = children(self.server)["inference"]
        return processor_s(inference)

    def abandoned(self) -> int:
        """Requests whose client has left, in the log so far."""
        return sum('"status":499' in line.replace(" ", "") for line in self.server.log)

    def settle(self) -> float:
        """Wait until nothing is queued or runs; returns the processor time so far."""
        until(lambda: queued(self.server) == 0)
        before = -1.0
        while (now := self.processor_s()) != before:
            before = now
            time.sleep(0.05)
        return now


@pytest.fixture(scope="module")
def watch(mini: Server) -> Watch:
    return Watch(mini)


@pytest.fixture(scope="module")
def whole_s(watch: Watch) -> float:
    """Processor time of the work when its client waits for the answer."""
    before = watch.settle()
    watch.server.answer("/embed", json.loads(WORK))
    return watch.settle() - before


@pytest.fixture
def client(mini: Server) -> Iterator[http.client.HTTPConnection]:
    with closing(http.client.HTTPConnection("127.0.0.1", mini.port, timeout=60)) as client:
        yield client


@pytest.mark.promise("An abandoned request is not computed, whatever the size of its body.")
@pytest.mark.parametrize("kib", KIB)
@pytest.mark.exclusive
def test_an_abandoned_request_is_not_computed(watch, whole_s, client, limit_s, kib):
    """A client that leaves while its texts are queued empties the queue, and the processor rests."""
    before, seen = watch.settle(), watch.abandoned()
    client.request("POST", "/embed", body_of(kib), HEADERS)
    until(lambda: queued(watch.server) > 0)
    client.close()
    until(lambda: watch.abandoned() == seen + 1, limit_s(DROPPED_S))
    until(lambda: queued(watch.server) == 0, limit_s(2 * DROPPED_S))
    assert watch.settle() - before < whole_s / 2


@pytest.mark.parametrize("kib", [0, 5000])
def test_a_request_that_is_abandoned_in_its_body_is_dropped(watch, client, limit_s, kib):
    """A client that leaves before all of its body has come leaves nothing to compute."""
    before, seen = watch.settle(), watch.abandoned()
    body = body_of(kib)
    client.putrequest("POST", "/embed")
    for name, value in {**HEADERS, "Content-Length": str(len(body))}.items():
        client.putheader(name, value)
    client.endheaders()
    client.send(body[:-1])
    time.sleep(0.1)  # until it is read
    client.close()
    until(lambda: watch.abandoned() == seen + 1, limit_s(DROPPED_S))
    assert watch.settle() - before < 0.1


@pytest.mark.exclusive
def test_a_request_that_is_abandoned_in_its_answer_is_dropped(watch, whole_s, client):
    """A client that leaves after the first line of its answer stops the rest."""
    before = watch.settle()
    client.request("POST", "/embed", WORK, {**HEADERS, "Accept": "application/x-ndjson"})
    answer = client.getresponse()
    assert "index" in json.loads(answer.readline())
    answer.close()
    client.close()
    until(lambda: queued(watch.server) == 0)
    assert watch.settle() - before < whole_s / 2
