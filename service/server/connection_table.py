"""The connections of one process: which are served, which are in excess, and which of them make room for a new one."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

IDLE_S = 1.0  # a connection with a request so recently makes no room
TRIES = 8  # connections that may have just received a request, before a new one counts as excess


class Evictable(Protocol):
    def evict(self) -> bool:
        """Close the connection, unless a request has just arrived on it. Returns whether it closes."""

    def abort(self) -> None: ...


class ConnectionTable:
    """At most `limit` connections are served; the others are excess connections, of which `excess` are kept open.

    When all places are taken, a new connection takes the place of one without a request: first of the oldest without a
    request so far, then of the one that has been idle for longest. Otherwise clients that connect and send nothing
    would keep all places until their time is over.
    """

    def __init__(
        self, limit: int, excess: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._clock = clock
        self._served: set[Evictable] = set()
        self._silent: dict[Evictable, None] = {}  # no request so far, oldest first
        self._idle: dict[Evictable, float] = {}  # between requests, with the time since when
        self._probing: set[Evictable] = set()  # with a health check or a scrape as its request
        self._most_excess = excess
        self._excess: dict[Evictable, None] = {}  # oldest first

    def admit(self, connection: Evictable) -> bool:
        """Serve a new connection. Returns False if every place is in use, which makes it an excess connection.

        Above their limit, the oldest excess connection is aborted. Otherwise a flood would take every descriptor that
        the process is allowed, including those for health checks and for the channel to a new inference process.
        """
        if len(self._served) >= self.limit and not self._evict_one():
            self._excess[connection] = None
            if len(self._excess) > self._most_excess:
                oldest = next(iter(self._excess))
                del self._excess[oldest]
                oldest.abort()
            return False
        self._served.add(connection)
        self._silent[connection] = None
        return True

    def begin_request(self, connection: Evictable, is_probe: bool) -> None:
        """Record that a connection has a request; is_probe: a health check or a scrape."""
        if self._silent:
            self._silent.pop(connection, None)
        self._idle.pop(connection, None)
        if is_probe and connection in self._served:
            self._probing.add(connection)

    def end_request(self, connection: Evictable) -> None:
        """Record that a connection has no request any more."""
        if self._probing:
            self._probing.discard(connection)
        if connection in self._served:
            self._idle.pop(connection, None)
            self._idle[connection] = self._clock()

    def discard(self, connection: Evictable) -> None:
        """Forget a connection that has closed."""
        self._served.discard(connection)
        self._probing.discard(connection)
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)
        self._excess.pop(connection, None)

    def is_full(self) -> bool:
        """Return whether a new connection would be an excess connection. Probes in progress do not count."""
        in_use = len(self._served) - len(self._probing)
        return in_use >= self.limit and next(self._candidates(), None) is None

    def _candidates(self) -> Iterator[Evictable]:
        yield from self._silent
        before = self._clock() - IDLE_S
        for connection, since in self._idle.items():
            if since > before:
                return
            yield connection

    def _evict_one(self) -> bool:
        for connection in [*islice(self._candidates(), TRIES)]:
            if connection.evict():
                self.discard(connection)
                return True
        return False
