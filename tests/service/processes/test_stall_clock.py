"""Time that nobody could have noticed is not counted."""

import asyncio
import time

from service.processes.stall_clock import StallClock


async def test_it_counts_the_ticks_that_were_waited_for() -> None:
    """Three ticks are three times as long as one."""
    stall_clock = StallClock(0.001)
    for _ in range(3):
        await stall_clock.tick()
    assert 3 == round(stall_clock.seconds / 0.001)


async def test_it_stands_still_while_the_process_does() -> None:
    """A loop that is held up for many ticks counts one."""
    stall_clock = StallClock(0.01)
    ticking = asyncio.create_task(stall_clock.tick())
    await asyncio.sleep(0)
    time.sleep(0.2)
    await ticking
    assert 0.01 == stall_clock.seconds
