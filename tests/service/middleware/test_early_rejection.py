"""What would be answered too late is refused before its body is read, by what bodies of its size were."""

from contextlib import suppress
from typing import Any, cast

import pytest

from service.engines.commands import RollBackModel
from service.engines.registry import Engines
from service.errors import Overloaded
from service.keys import Key, digest, make_key
from service.middleware.body_memory import content_length
from service.middleware.early_rejection import COMING_S, BodySize, EarlyRejection
from service.middleware.request_context import RequestContext
from service.middleware.service_state import Service
from service.observability.metrics import Metrics
from service.scheduling.load import Backlog, Flow, Load, RemainingWork
from service.settings import Settings
from tests.service.fakes import FakeEngines

BODY = {"inputs": "a text"}
TINY = Flow("tiny@1")
SECONDS = {"X-Request-Timeout-Ms": "1000"}


def waiting(*tokens: int, flow: Flow = TINY) -> Load:
    """A device that computes 100 tokens a second, with waiting requests of these sizes."""
    return Load(
        {flow.bundle: 100.0},
        {flow: Backlog.of(*[RemainingWork(n, 1) for n in tokens])} if tokens else {},
    )


BUSY = {TINY: Backlog.of(*[RemainingWork(1, 1)] * 1000)}
TWO = Load({"tiny@1": 100.0, "other@1": 100.0}, BUSY)


@pytest.mark.parametrize(
    ("load", "expected", "headers", "status"),
    [
        (waiting(), ["tiny@1"], {}, 200),  # an idle device takes all
        (TWO, ["tiny@1", "other@1"], {}, 200),  # the body may name the idle model
        (TWO, ["tiny@1", "gone@1"], {}, 429),  # a version that is kept for a rollback is not used
        (waiting(*[1] * 1000, flow=Flow("tiny@1", 1)), ["tiny@1"], {}, 200),  # bulk waits
        (waiting(*[1] * 1000, flow=Flow("tiny@1", 1)), ["tiny@1"], {"X-Priority": "bulk"}, 429),
    ],
)
async def test_the_soonest_model_decides(client, engines, load, expected, headers, status):
    """A request is refused if every model that it may be for would be late in its class."""
    engines.told, engines.expected = load, expected
    response = await client.post("/embed", json=BODY, headers={**SECONDS, **headers})
    assert status == response.status_code


async def test_what_would_be_late_is_not_read(client, engines, engine):
    """Two seconds of work wait and the request has one: it is refused without being parsed."""
    engines.told = waiting(*[1] * 200)
    response = await client.post("/embed", content=b"no JSON", headers=SECONDS)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert response.headers["Retry-After"] == "2"
    assert not engine.asked
    patient = {"X-Request-Timeout-Ms": "10000"}
    assert (await client.post("/embed", json=BODY, headers=patient)).status_code == 200


@pytest.mark.parametrize(("size", "status"), [(10, 429), (11, 413)])
async def test_a_body_that_is_too_large_is_refused_for_good(client_with, engines, size, status):
    """However long the queue is, a body over the limit gets 413 and no time to come back."""
    engines.told = waiting(*[1] * 10_000)
    async with client_with(max_body_bytes=10) as client:
        response = await client.post("/embed", content=b" " * size, headers=SECONDS)
    assert status == response.status_code
    assert (status == 429) == ("Retry-After" in response.headers)


async def test_pages_are_not_refused(client, engines):
    """A GET computes nothing."""
    engines.told = waiting(*[1] * 10_000)
    assert (await client.get("/models")).status_code == 200


async def test_administration_is_let_in(engines, client_with):
    """A rollback must be possible even if no inference request can meet its deadline."""
    engines.told = waiting(*[1] * 1000, flow=Flow("tiny@1", 0, "ops"))
    key = make_key()
    keys = {"ops": Key(sha256=digest(key).hex(), may=("admin", "inference"))}
    bearer = {"Authorization": f"Bearer {key}", **SECONDS}
    async with client_with(keys=keys) as client:
        assert (await client.post("/embed", json=BODY, headers=bearer)).status_code == 429
        assert (await client.post("/admin/models/tiny/rollback", headers=bearer)).status_code == 200
    assert engines.commands == [RollBackModel(model="tiny", by="ops")]


def admission() -> EarlyRejection:
    return EarlyRejection(Service(Settings(), Metrics()))


def come(made: EarlyRejection, at: float, **fields: Any) -> RequestContext:
    """A request of 100 bytes and a second's time. Raises Overloaded."""
    context = RequestContext(
        "a request", at, {"content-length": "100", "x-request-timeout-ms": "1000"}, **fields
    )
    made({"method": "POST", "path": "/embed"}, context)
    return context


@pytest.fixture
def door(engines: FakeEngines) -> EarlyRejection:
    """An early rejection for a device of 100 tokens a second with an unchanged load; bodies have ten tokens."""
    engines.told = waiting(1)
    service = Service(Settings(), Metrics())
    service.engines = cast(Engines, engines)
    made = EarlyRejection(service)
    made._learn(BodySize(100), 10, 40)
    return made


def let_in(door: EarlyRejection, at: float = 0.0, **fields: Any) -> list[RequestContext]:
    """As many as come in together before one does not."""
    came: list[RequestContext] = []
    with suppress(Overloaded):
        while len(came) < 100:
            came.append(come(door, at, **fields))
    return came


@pytest.mark.parametrize("priority", [0, 1])
def test_arriving_requests_are_counted(door, priority):
    """At most half a second's work is accepted at once, until the device reports its load."""
    assert len(let_in(door, priority=priority)) == 4


def test_others_that_come_do_not_matter(door):
    """What one floods with is not what another waits for."""
    let_in(door, tenant="one")
    assert len(let_in(door, tenant="another")) == 4


def test_what_comes_for_another_bundle_does_not_matter(door, engines):
    """A request for another model is accepted, even if the arriving ones may overload one model."""
    engines.told = Load(
        {"tiny@1": 100.0, "other@1": 100.0}, {TINY: Backlog.of(RemainingWork(1000, 1))}
    )
    assert len(let_in(door)) == 100


def test_an_arrived_request_is_no_longer_expected(door):
    """The device reports the requests whose texts it has; requests that are over take no capacity."""
    first, second, *_ = let_in(door)
    assert first.on_submit is not None
    first.on_submit()
    first.on_submit()
    for context in (first, second):
        for finish in context.on_finish:
            finish(context)
    assert len(let_in(door)) == 2


def test_a_slow_body_is_not_waited_for(door):
    """A body that never ends does not hold the door shut."""
    let_in(door, at=0.0)
    assert not let_in(door, at=COMING_S - 0.1)
    assert len(let_in(door, at=COMING_S)) == 4


def test_texts_that_would_be_encoded_late_are_refused(door, engines):
    """A body of long texts is refused while texts of its tenant wait for the threads; others are not."""
    engines.told = waiting()
    door._learn(BodySize(1_000_000), 1, 1_000_000)
    door._learn(BodySize(100, compressed=True), 1, 1_000_000)
    large = {"content-length": "1000000", "x-request-timeout-ms": "1000"}
    small = {"content-length": "100", "x-request-timeout-ms": "1000"}

    def is_refused(headers, tenant="crawler"):
        context = RequestContext("a request", 0.0, headers, tenant=tenant)
        try:
            door({"method": "POST", "path": "/embed"}, context)
        except Overloaded:
            return True
        return False

    assert not is_refused(large)
    with engines.text_threads.open(Flow("tiny@1", 0, "crawler"), [250_000] * 20):
        assert is_refused(large)
        assert is_refused({**small, "content-encoding": "gzip"})
        assert not is_refused(small)
        assert not is_refused(small, "app")
    assert not is_refused(large)


def learned(*seen: tuple[int, int]) -> EarlyRejection:
    made = admission()
    for size, tokens in seen:
        made._learn(BodySize(size), tokens, 4 * tokens)
    return made


@pytest.mark.parametrize(
    ("seen", "size", "expected"),
    [
        ([], 5000, 1),
        ([(100, 30)], 100, 30),
        ([(100, 30)], 127, 30),
        ([(100, 30), (1000, 200)], 1_000_000, 200),
        ([(1000, 200)], 10, 1),
        ([(100, 0), (0, 30)], 100, 1),
        ([(100, 20), (100, 40)], 100, 21),
    ],
    ids=["nothing", "same", "like", "larger", "smaller", "failed", "more and more"],
)
def test_a_body_is_expected_to_be_as_those_of_its_size(seen, size, expected):
    """What is larger than all that came is expected to be like the largest: too little, and then learned."""
    assert learned(*seen).expect(BodySize(size)) == expected


@pytest.mark.parametrize(
    ("said", "size"), [({}, 0), ({"content-length": "12"}, 12), ({"content-length": "many"}, 0)]
)
def test_the_length_is_what_the_client_says(said, size):
    """Nothing is expected of a body that comes in chunks."""
    assert content_length(said) == size
