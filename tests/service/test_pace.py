"""Refusals go at once while they are few; in a flood they are held back, each for a while, and only so many."""

import asyncio
import time

from service.pace import Pace


async def turns(pace: Pace, count: int) -> list[float]:
    """Seconds that each of so many refusals, all at once, was held back."""
    began = time.monotonic()

    async def turn() -> float:
        await pace.turn()
        return time.monotonic() - began

    return await asyncio.gather(*[turn() for _ in range(count)])


async def test_few_are_not_held_back() -> None:
    """As many as a second allows may go together after a pause."""
    pace = Pace(per_s=10, held_s=0.5)
    began = time.monotonic()
    for _ in range(5):
        await pace.turn()
    assert time.monotonic() - began < 0.1


async def test_many_take_turns() -> None:
    """Of fifteen at ten a second five go at once, and one in each tenth that follows, in order."""
    held = await turns(Pace(per_s=10, held_s=0.5), 9)
    assert held == sorted(held)
    assert sum(seconds < 0.05 for seconds in held) in (5, 6)
    assert 0.25 <= held[-1] < 0.6


async def test_nobody_is_held_longer_than_that() -> None:
    """Whatever the crowd."""
    held = await turns(Pace(per_s=10, held_s=0.2), 100)
    assert max(held) < 0.5


async def test_no_more_are_held_than_that() -> None:
    """The one that has waited longest goes instead."""
    pace = Pace(per_s=1, held_s=10, most=3)
    waiting = [asyncio.create_task(pace.turn()) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert [task.done() for task in waiting] == [True] * 17 + [False] * 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_is_gone_is_let_go() -> None:
    """A turn that nobody waits for any more harms nobody."""
    pace = Pace(per_s=20, held_s=1, most=100)
    waiting = [asyncio.create_task(pace.turn()) for _ in range(25)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.sleep(0.5)
    assert not pace._held
