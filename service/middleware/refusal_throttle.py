"""Throttling of refusals: a client that retries at once is refused later, and so costs the service little time."""

import asyncio
from collections.abc import Callable

REFUSALS_PER_S = 200  # sent immediately; each further refusal waits for its turn
HELD_S = 1.0  # longest delay of one refusal
HELD = 4096  # largest number of delayed refusals, at most one per connection


class RefusalThrottle:
    """Throttle of `per_s` refusals per second.

    Each refusal is delayed by at most `held_s` seconds. If more than `most` are delayed, the oldest is sent.
    """

    def __init__(
        self, per_s: float = REFUSALS_PER_S, held_s: float = HELD_S, most: int = HELD
    ) -> None:
        self._step_s = 1 / per_s
        self._held_s = held_s
        self._most = most
        self._next = 0.0
        self._count = 0
        self._running = False  # a call of `go` is in progress
        self._held: dict[int, tuple[Callable[[], object], asyncio.TimerHandle]] = {}  # oldest first

    async def turn(self) -> None:
        """Wait until the next refusal may be sent."""
        gone = asyncio.Event()
        self.hold(gone.set)
        await gone.wait()

    def hold(self, go: Callable[[], object]) -> None:
        """Call `go` in its turn, maybe at once. Calls never nest, as `go` may start a request that is refused."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        at = max(self._next, now - self._held_s)  # after a pause, several may be sent together
        self._next = min(at + self._step_s, now + self._held_s)
        if at <= now:
            self._run(go)
            return
        self._count += 1
        number = self._count
        self._held[number] = go, loop.call_at(at, self._go, number)
        if len(self._held) > self._most:
            oldest, timer = self._held.pop(next(iter(self._held)))
            timer.cancel()
            loop.call_soon(self._run, oldest)

    def _go(self, number: int) -> None:
        go, _ = self._held.pop(number)
        self._run(go)

    def _run(self, go: Callable[[], object]) -> None:
        if self._running:
            asyncio.get_running_loop().call_soon(self._run, go)
            return
        self._running = True
        try:
            go()
        finally:
            self._running = False
