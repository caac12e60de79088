"""Time in which a process could not run is not counted."""

import asyncio
import time

from service.liveness import LastSign, StallClock, hang_limit_s


async def test_it_counts_the_ticks_that_were_waited_for():
    """Three ticks are three times as long as one."""
    stall_clock = StallClock(0.001)
    for _ in range(3):
        await stall_clock.tick()
    assert 3 == round(stall_clock.seconds / 0.001)


async def test_it_stands_still_while_the_process_does():
    """A loop that is held up for many ticks counts one."""
    stall_clock = StallClock(0.01)
    ticking = asyncio.create_task(stall_clock.tick())
    await asyncio.sleep(0)
    time.sleep(0.2)
    await ticking
    assert 0.01 == stall_clock.seconds


async def test_silence_is_counted_from_the_last_sign():
    """It begins when the sign is made, and again when it is renewed."""
    clock = StallClock(0.001)
    await clock.tick()
    sign = LastSign(clock)
    assert 0 == sign.silent_s
    await clock.tick()
    assert 0.001 == sign.silent_s
    sign.renew()
    assert 0 == sign.silent_s


def test_a_long_batch_may_take_long():
    """The setting is the least limit, and a batch that is expected to take longer has more."""
    assert 10 == hang_limit_s(10, 0.1)
    assert 40 == hang_limit_s(10, 2)
