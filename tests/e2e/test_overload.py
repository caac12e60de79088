"""Asked for more than it can do, the service does what it can, and refuses the rest early, by name and at a pace.

Half of the requests are in the dialects of other servers. Every answer is compared with the one that the same request
gets alone.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks.lib.load_generator import Measured, closed_loop, open_loop, request_bytes
from tests import samples
from tests.e2e.calls import Call, embed_calls, same_answer
from tests.e2e.conftest import LIVENESS_S, Server, serving, until
from tests.json_files import edit_json

pytestmark = [pytest.mark.e2e, pytest.mark.exclusive, pytest.mark.nightly]

DEADLINE_MS = 2000
TIMES = 10  # its capacity
CROWD = 500  # connections: more than may wait for as long as a request has
LATE, LONG_S = 0.05, 20.0
LEFT = 0.5  # of it, next to other processes of this machine; the benchmarks measure the exact share


@pytest.fixture(scope="module")
def impatient(mini_bundle: Path) -> Iterator[Server]:
    """A server whose requests have two seconds."""
    with serving(mini_bundle, "--deadline-ms", DEADLINE_MS) as server:
        yield server


@dataclass
class Traffic:
    """Requests for embeddings, and what a server answers to them.

    calls: every other one is in the dialect of another server
    alone: the answer that each gets alone
    answers: of a load: the index of a request, and the body
    """

    calls: Sequence[Call]
    alone: Sequence[Any]
    headers: Mapping[str, str]
    answers: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def requests(self) -> list[bytes]:
        return [
            request_bytes(path, json.dumps(body).encode(), **self.headers)
            for path, body in self.calls
        ]

    def on_answer(self, number: int, body: bytes) -> None:
        self.answers.append((number, body))

    def check_answers(self) -> None:
        """Require that each answer is the one that its request gets alone.

        Where all requests were answered twice or more, every dialect is among them.
        """
        wrong = [
            self.calls[number]
            for number, body in self.answers
            if not same_answer(self.alone[number], json.loads(body))
        ]
        assert not wrong
        if len(self.answers) >= 2 * len(self.calls):
            answered = {self.calls[number][0] for number, _ in self.answers}
            assert answered == {path for path, _ in self.calls}


def traffic(server: Server, model: str | None = None, **headers: str) -> Traffic:
    """Return requests with texts that fill a window: some milliseconds of work each."""
    calls = embed_calls([samples.text(400, seed=seed) for seed in range(32)], model)
    return Traffic(calls, [server.answer(*call) for call in calls], headers)


def check(found: Measured, capacity: float) -> None:
    """Refused or answered, at the rate of before; in a few seconds a machine that stands still may be too late."""
    assert found.requests
    assert found.others[429]
    assert set(found.others) <= {429, 504}
    if found.seconds > LONG_S:
        assert found.others[504] <= LATE * found.requests
        assert found.rate >= LEFT * capacity


def capacity(server: Server, sent: Traffic) -> float:
    load = closed_loop(server.port, sent.requests, 8, 2.0, retry=True, on_answer=sent.on_answer)
    found: Measured = uvloop.run(load)
    return found.rate


@pytest.mark.promise(
    "Under overload, the service refuses requests early with an error code of its own, at almost no cost."
)
def test_a_flood_is_answered_or_refused(impatient, seconds, limit_s):
    """At ten times its capacity, the service answers accepted requests in time and returns no 500."""
    sent = traffic(impatient)
    rate = capacity(impatient, sent)
    flood = open_loop(
        impatient.port,
        sent.requests,
        TIMES * rate,
        seconds,
        patience_s=20,
        on_answer=sent.on_answer,
    )
    found = uvloop.run(flood)
    check(found, rate)
    sent.check_answers()
    text = {"inputs": "a single text"}
    until(lambda: impatient.post("/embed", text).status == 200, limit_s(10))


@pytest.mark.promise("Clients that retry at once after a refusal gain nothing.")
def test_insistence_buys_nothing(impatient, seconds):
    """Hundreds of connections that never wait: the service goes on at its rate."""
    sent = traffic(impatient)
    rate = capacity(impatient, sent)
    crowd = closed_loop(
        impatient.port, sent.requests, CROWD, seconds, retry=True, on_answer=sent.on_answer
    )
    found = uvloop.run(crowd)
    check(found, rate)
    sent.check_answers()


def beside(
    server: Server, flood: Traffic, lone: Traffic, seconds: float
) -> tuple[Measured, Measured]:
    """A crowd that insists, and one client that asks one thing after the other.

    A busy machine may answer none of either in a few seconds; then the measurement is repeated for longer.
    """

    async def both() -> tuple[Measured, Measured]:
        crowd = closed_loop(
            server.port, flood.requests, CROWD, seconds, retry=True, on_answer=flood.on_answer
        )
        alone = closed_loop(server.port, lone.requests, 1, seconds, on_answer=lone.on_answer)
        found = await asyncio.gather(crowd, alone)
        return found[0], found[1]

    crowd, alone = uvloop.run(both())
    if not (crowd.requests and alone.requests) and seconds < LIVENESS_S / 2:
        return beside(server, flood, lone, 4 * seconds)
    assert crowd.requests
    assert alone.requests
    assert not alone.others
    flood.check_answers()
    lone.check_answers()
    return crowd, alone


@pytest.mark.promise("A flood of bulk requests delays interactive ones by a batch at most.")
def test_a_flood_of_bulk_does_not_hold_up_the_others(mini_bundle, seconds):
    """Interactive texts take a few batches' time while bulk, accepted to the brim, takes seconds."""
    with serving(mini_bundle, "--deadline-ms", 2 * DEADLINE_MS) as server:
        crowd, alone = beside(server, traffic(server, x_priority="bulk"), traffic(server), seconds)
    assert alone.percentile(50) < crowd.percentile(50) / 2


@pytest.mark.promise("A flood on one model delays another by a batch at most.")
def test_a_flood_on_one_model_does_not_hold_up_another(mini_bundle, tmp_path, seconds):
    """The other one's texts go next, and are never refused."""
    other = tmp_path / "other"
    shutil.copytree(mini_bundle, other)
    edit_json(other / "manifest.json", name="other")
    with serving(mini_bundle, other, "--deadline-ms", 2 * DEADLINE_MS) as server:
        crowd, alone = beside(server, traffic(server), traffic(server, "other"), seconds)
    assert alone.percentile(50) < crowd.percentile(50) / 2
