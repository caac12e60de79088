"""How much of something somebody may have in a minute."""

import time
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Holds a minute's worth, is filled steadily, and may be overdrawn by what is known only afterwards.

    per_minute: what flows in; the bucket holds as much, and at least 1
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / MINUTE_S
        self._size = max(per_minute, 1.0)
        self._clock = clock
        self._level = self._size
        self._filled_at = clock()

    def wait_s(self) -> float:
        """Seconds until there is 1 to be had; 0 when there is."""
        now = self._clock()
        inflow = (now - self._filled_at) * self._per_second
        self._level = min(self._size, self._level + inflow)
        self._filled_at = now
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, amount: float) -> None:
        self._level -= amount
