"""Refusals at a pace: a client that asks again at once is refused later, and cannot buy time of the service with it."""

import asyncio
from collections import OrderedDict

REFUSALS_PER_S = 200  # that go at once; beyond, each waits for its turn
HELD_S = 1.0  # the longest that one is held back
HELD = 512  # the most that are held back together


class Pace:
    """Turns, so many a second; each is held back for `held_s` at most, and of more than `most` the oldest goes."""

    def __init__(
        self, per_s: float = REFUSALS_PER_S, held_s: float = HELD_S, most: int = HELD
    ) -> None:
        self._step_s = 1 / per_s
        self._held_s = held_s
        self._most = most
        self._next = 0.0
        self._held: OrderedDict[asyncio.Future[None], asyncio.TimerHandle] = OrderedDict()

    async def turn(self) -> None:
        """Wait until the next refusal may go."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        at = max(self._next, now - self._held_s)  # after a pause some may go together
        self._next = min(at + self._step_s, now + self._held_s)
        if at <= now:
            return
        going = loop.create_future()
        self._held[going] = loop.call_at(at, self._go, going)
        if len(self._held) > self._most:
            self._go(next(iter(self._held)))
        try:
            await going
        finally:
            self._go(going)

    def _go(self, going: asyncio.Future[None]) -> None:
        if timer := self._held.pop(going, None):
            timer.cancel()
            if not going.done():
                going.set_result(None)
