"""The memory of responses that clients do not read, which all connections of a process share."""

import asyncio
import time
from collections.abc import Callable
from math import inf

import structlog

from service.server.flow_control import FlowControl

log = structlog.get_logger()

UNREAD_BYTES = 64 << 20  # of all responses that wait for their clients
LOOK_S = 1.0  # between two looks while there are more; a younger response is not judged
LEFT_S = 10.0  # a client that needs no longer for the rest keeps its connection


class UnreadResponses:
    """The connections with a response that waits for its client.

    If the responses have more than `limit` bytes together, the connections are closed whose clients would take longest
    for the rest at the rate at which they have read so far, until the responses are within the limit. A response that
    is younger than `LOOK_S`, and one whose rest takes less than `LEFT_S`, are kept.
    """

    def __init__(
        self, limit: int = UNREAD_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._waiting: dict[
            FlowControl, tuple[float, int]
        ] = {}  # since when, and what was sent then
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: FlowControl) -> None:
        """Record that a response of a connection waits for its client."""
        self._waiting[connection] = self._clock(), connection.sent
        if self._timer is None:
            self._look()

    def discard(self, connection: FlowControl) -> None:
        """Record that no response of a connection waits any more."""
        self._waiting.pop(connection, None)

    def _look(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        excess = sum(connection.unread for connection in self._waiting) - self._limit
        if excess > 0:
            self._drop_slowest(excess)
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _drop_slowest(self, excess: int) -> None:
        dropped = 0
        for connection in sorted(self._waiting, key=self._left_s, reverse=True):
            if excess <= 0 or self._left_s(connection) < LEFT_S:
                break
            excess -= connection.unread
            dropped += 1
            self.discard(connection)
            connection.abort()
        if dropped:
            log.warning("clients do not read their responses", closed_connections=dropped)

    def _left_s(self, connection: FlowControl) -> float:
        """Return the seconds that a client needs for the rest, 0 if its response is too young to judge."""
        since, sent = self._waiting[connection]
        lasted_s = self._clock() - since
        if lasted_s < LOOK_S:
            return 0.0
        read = connection.sent - sent
        return connection.unread * lasted_s / read if read else inf
