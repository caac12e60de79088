"""Concurrent callers share a result, and never get one of a call that began before they came."""

import asyncio

import pytest

from service.observability.shared_call import SharedCall


class Slow:
    """A computation that waits for an event, and returns the number of its call."""

    def __init__(self) -> None:
        self.calls = 0
        self.running = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> bytes:
        self.calls += 1
        self.running += 1
        assert 1 == self.running
        number = self.calls
        await self.go.wait()
        self.running -= 1
        if self.error:
            raise self.error
        return b"%d" % number


async def test_callers_share_a_call_that_began_after_they_came():
    """Callers that come while one runs share the next."""
    slow = Slow()
    shared = SharedCall(slow)
    first = [asyncio.create_task(shared()) for _ in range(10)]
    while not slow.calls:
        await asyncio.sleep(0)
    then = [asyncio.create_task(shared()) for _ in range(10)]
    await asyncio.sleep(0)
    slow.go.set()
    assert {b"1"} == set(await asyncio.gather(*first))
    assert {b"2"} == set(await asyncio.gather(*then))
    assert b"3" == await shared()


async def test_a_cancelled_caller_cancels_no_other():
    """A failure without a caller left is not reported as an exception that was never retrieved."""
    slow = Slow()
    shared = SharedCall(slow)
    gone, stays = asyncio.create_task(shared()), asyncio.create_task(shared())
    while not slow.calls:
        await asyncio.sleep(0)
    gone.cancel()
    slow.go.set()
    assert b"1" == await stays
    slow.error, slow.go = ValueError("broken"), asyncio.Event()
    gone = asyncio.create_task(shared())
    while slow.calls < 2:
        await asyncio.sleep(0)
    gone.cancel()
    slow.go.set()
    with pytest.raises(ValueError, match="broken"):
        await shared()
    slow.error = None
    assert b"4" == await shared()


async def test_calls_take_a_part_of_the_time():
    """Fifty callers get no more than that; a single one, after a pause, does not wait."""
    calls = []
    time = asyncio.get_running_loop().time

    async def work():
        calls.append(time())
        await asyncio.sleep(0.01)
        return b""

    shared = SharedCall(work, share=0.1)
    end = time() + 1.0

    async def insist():
        while time() < end:
            await shared()

    await asyncio.gather(*[insist() for _ in range(50)])
    assert 1 < len(calls) <= 12
    await asyncio.sleep(0.2)
    before = len(calls)
    asking = asyncio.create_task(shared())
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(calls) == before + 1
    await asking
