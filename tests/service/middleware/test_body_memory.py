import asyncio

import pytest

from service.errors import Overloaded
from service.middleware.body_memory import BODIES, SMALL, Budget, MemoryReservation
from service.middleware.service_state import Service
from service.observability.metrics import Metrics
from service.settings import Settings
from service.tasks.embedding import Embedding
from tests.service.api.test_native_routes import error_of

LARGE = {"inputs": "a" * 2 * SMALL}


def test_large_bodies_share_the_budget():
    """A large body is refused once its tenant holds more than is left; returned bytes can be reserved again."""
    body_memory = Budget(6 * SMALL)
    first, second = (MemoryReservation(body_memory, tenant) for tenant in "ab")
    first.take(3 * SMALL)
    second.take(SMALL + SMALL // 2)
    with pytest.raises(Overloaded):
        second.take(1)
    first.release()
    second.take(SMALL)
    second.release()
    assert (6 * SMALL, 0) == (body_memory.left, len(body_memory.held))


def test_a_tenant_holds_at_most_as_much_as_it_leaves():
    """Many bodies of a tenant leave memory for a large body of each of the next ones."""
    body_memory = Budget(64 * SMALL)
    for tenant in "abcd":
        own = [MemoryReservation(body_memory, tenant) for _ in range(64)]
        before = body_memory.left
        taken = 0
        for reservation in own:
            try:
                reservation.take(2 * SMALL)
                taken += 2 * SMALL
            except Overloaded:
                reservation.release()
        assert before / 2 - 2 * SMALL < taken <= before / 2
        assert before - taken == body_memory.left
    MemoryReservation(body_memory, "e").take(2 * SMALL)


def test_small_bodies_always_have_room():
    """They are let in while large ones fill the budget, and are counted."""
    body_memory = Budget(SMALL)
    MemoryReservation(body_memory, "a").take(SMALL)
    small = MemoryReservation(body_memory, "b")
    small.take(SMALL)
    assert -SMALL == body_memory.left
    with pytest.raises(Overloaded):
        small.take(1)


def test_there_is_room_for_some_of_the_largest():
    """The room grows with what one body may have."""
    assert BODIES * 1000 == Service(Settings(max_body_bytes=1000), Metrics()).body_memory.left


async def test_requests_hold_their_room_until_they_are_answered(client_with, engine):
    """While as many large ones are in work as may be, another is refused and a small one is not."""
    engine.hold = asyncio.Event()
    # Half of the budget, in bodies of two thirds of the largest size and some bytes around the text.
    accepted = BODIES * 3 // 4 - 1
    async with client_with(max_body_bytes=3 * SMALL) as client:
        asked = [asyncio.create_task(client.post("/embed", json=LARGE)) for _ in range(20)]
        while sum(request.done() for request in asked) < 20 - accepted:
            await asyncio.sleep(0)
        small = asyncio.create_task(client.post("/embed", json={"inputs": "a"}))
        while engine.asked != Embedding(inputs=["a"]):
            await asyncio.sleep(0)
        assert {(429, "overloaded", None)} == {error_of(r.result()) for r in asked if r.done()}
        engine.hold.set()
        statuses = [(await request).status_code for request in asked]
        assert [accepted, 20 - accepted] == [statuses.count(200), statuses.count(429)]
        assert 200 == (await small).status_code
        assert 200 == (await client.post("/embed", json=LARGE)).status_code
