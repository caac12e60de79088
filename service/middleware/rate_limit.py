"""Rate limits per minute."""

import time
from collections.abc import Callable

MINUTE_S = 60.0


class Bucket:
    """Token bucket that refills steadily.

    The level may become negative, because an amount may be known only after its use.

    per_minute: inflow per minute
    size: the most that the bucket holds, at least 1; None for one minute's amount
    """

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        size: float | None = None,
    ) -> None:
        self._per_second = per_minute / MINUTE_S
        self._size = max(per_minute if size is None else size, 1.0)
        self._clock = clock
        self._level = self._size
        self._filled_at = clock()

    def wait_s(self) -> float:
        """Return the seconds until the level reaches 1; 0 if it already has."""
        now = self._clock()
        inflow = (now - self._filled_at) * self._per_second
        self._level = min(self._size, self._level + inflow)
        self._filled_at = now
        return max(0.0, (1.0 - self._level) / self._per_second)

    def take(self, amount: float) -> None:
        self._level -= amount
