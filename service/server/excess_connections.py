"""Connections above a process's limit: it keeps a few of them open for a moment, so that health checks succeed."""

from typing import Protocol


class Abortable(Protocol):
    def abort(self) -> None: ...


class ExcessConnections:
    """The excess connections of one process, oldest first.

    Without a limit, a flood would take every descriptor that the process is allowed, including the descriptors for
    health checks and for the channel to a new inference process.

    limit: number of connections that are kept open
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[Abortable, None] = {}

    def add(self, connection: Abortable) -> None:
        """Add a connection, and abort the oldest if there are more than the limit."""
        self._open[connection] = None
        if len(self._open) > self.limit:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.abort()

    def discard(self, connection: Abortable) -> None:
        self._open.pop(connection, None)
