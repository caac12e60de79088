"""Responses that clients do not read have a limit together."""

import asyncio
from dataclasses import dataclass

import pytest

from service.server import unread_responses
from service.server.unread_responses import LEFT_S, UnreadResponses
from tests.service.fakes import Clock

LIMIT = 100


@dataclass(eq=False)
class Connection:
    """One whose client has read `sent` bytes, and `unread` wait."""

    unread: int
    sent: int = 0
    dropped: bool = False

    def abort(self) -> None:
        self.dropped, self.unread = True, 0

    def read(self, count: int) -> None:
        self.unread, self.sent = self.unread - count, self.sent + count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that is moved by hand; the table looks again at once."""
    monkeypatch.setattr(unread_responses, "LOOK_S", 0.001)
    return Clock()


async def look() -> None:
    for _ in range(5):
        await asyncio.sleep(0.005)


async def test_the_slowest_reader_is_dropped(clock):
    """Until the others are within the limit: the one that reads nothing, not the largest and not the oldest."""
    responses = UnreadResponses(LIMIT, clock)
    steady, idle, slow = Connection(90), Connection(40), Connection(40)
    for connection in (steady, idle, slow):
        responses.add(connection)
    clock.now = 5.0
    steady.read(45)
    slow.read(1)
    await look()
    assert [False, True, False] == [one.dropped for one in (steady, idle, slow)]


async def test_whoever_will_be_done_soon_is_kept(clock):
    """A single response may be larger than the limit."""
    responses = UnreadResponses(LIMIT, clock)
    fast, slow = Connection(1000), Connection(1000)
    for connection in (fast, slow):
        responses.add(connection)
    clock.now = LEFT_S
    fast.read(510)
    slow.read(490)
    await look()
    assert (False, True) == (fast.dropped, slow.dropped)


async def test_within_the_limit_none_is_dropped(clock):
    """Nor is one that has read its response meanwhile."""
    responses = UnreadResponses(LIMIT, clock)
    first, second = Connection(60), Connection(60)
    responses.add(first)
    responses.add(second)
    responses.discard(first)
    clock.now = 100.0
    await look()
    assert (False, False) == (first.dropped, second.dropped)


async def test_a_young_response_is_not_judged():
    """A client cannot have read anything of a response that is written just now."""
    clock = Clock()
    responses = UnreadResponses(LIMIT, clock)
    young = Connection(1000)
    responses.add(young)
    clock.now = unread_responses.LOOK_S / 2
    responses._look()
    assert not young.dropped
