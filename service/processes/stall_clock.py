"""A clock that stands still while this process does."""

import asyncio


class StallClock:
    """Seconds in which this process could have noticed something, by ticks of its event loop.

    Who is waited for by this clock is not blamed for time in which the machine slept, or this process was stopped or
    got no core: however long that took, it counts as one tick.
    """

    def __init__(self, tick_s: float) -> None:
        self.seconds = 0.0
        self._tick_s = tick_s

    async def tick(self) -> None:
        """Wait for the next tick; one task does, again and again."""
        await asyncio.sleep(self._tick_s)
        self.seconds += self._tick_s
