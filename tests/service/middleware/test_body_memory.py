import asyncio

import pytest

from service.errors import Overloaded
from service.middleware.body_memory import BODIES, SMALL, MemoryBudget, MemoryReservation
from service.middleware.service_state import Service
from service.observability.metrics import Metrics
from service.settings import Settings
from service.tasks.embedding import Embedding
from tests.service.api.test_native_routes import ClientWith, error_of
from tests.service.fakes import FakeEngine

LARGE = {"inputs": "a" * 2 * SMALL}


def test_large_bodies_share_a_room() -> None:
    """One that comes when it is full is refused, however far it is; what others leave can be had again."""
    body_memory = MemoryBudget(3 * SMALL)
    first, second = MemoryReservation(body_memory), MemoryReservation(body_memory)
    first.take(2 * SMALL)
    second.take(SMALL)
    with pytest.raises(Overloaded):
        second.take(1)
    second.release()
    first.take(SMALL)
    first.release()
    assert 3 * SMALL == body_memory.left


def test_small_bodies_always_have_room() -> None:
    """They are let in while large ones fill it, and are counted."""
    body_memory = MemoryBudget(SMALL)
    MemoryReservation(body_memory).take(SMALL)
    small = MemoryReservation(body_memory)
    small.take(SMALL)
    assert -SMALL == body_memory.left
    with pytest.raises(Overloaded):
        small.take(1)


def test_there_is_room_for_some_of_the_largest() -> None:
    """The room grows with what one body may have."""
    assert BODIES * 1000 == Service(Settings(max_body_bytes=1000), Metrics()).body_memory.left


async def test_requests_hold_their_room_until_they_are_answered(
    client_with: ClientWith, engine: FakeEngine
) -> None:
    """While as many large ones are in work as may be, another is refused and a small one is not."""
    engine.hold = asyncio.Event()
    accepted = BODIES * 3 // 2 - 1  # of as many bytes, and some beside the text
    async with client_with(max_body_bytes=3 * SMALL) as client:
        asked = [asyncio.create_task(client.post("/embed", json=LARGE)) for _ in range(20)]
        while sum(request.done() for request in asked) < 20 - accepted:
            await asyncio.sleep(0)
        small = asyncio.create_task(client.post("/embed", json={"inputs": "a"}))
        while engine.asked != Embedding(texts=["a"]):
            await asyncio.sleep(0)
        assert {(429, "overloaded", None)} == {error_of(r.result()) for r in asked if r.done()}
        engine.hold.set()
        statuses = [(await request).status_code for request in asked]
        assert [accepted, 20 - accepted] == [
            statuses.count(200),
            statuses.count(429),
        ]
        assert 200 == (await small).status_code
        assert 200 == (await client.post("/embed", json=LARGE)).status_code
