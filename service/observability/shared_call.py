"""One call for many callers: all callers that arrive before the next call begins share its result."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress


class SharedCall:
    """Calls `make`, one call at a time. Each caller gets the result of a call that began after the caller arrived.

    share: largest part of the time that calls may take; the next call waits accordingly
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]], share: float = 1.0) -> None:
        self._make = make
        self._pause = 1 / share - 1  # as a multiple of the previous call's duration
        self._free_at = 0.0  # by the event loop's clock
        self._running: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def __call__(self) -> bytes:
        """Return the result of the next call. Raises the errors of `make`."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(retrieve)
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        time = asyncio.get_running_loop().time
        await asyncio.sleep(self._free_at - time())
        self._running, self._next = self._next, None
        began = time()
        try:
            return await self._make()
        finally:
            ended = time()
            self._free_at = ended + self._pause * (ended - began)


def retrieve(done: asyncio.Task[bytes]) -> None:
    """Mark an exception as retrieved, since all callers may have been cancelled."""
    with suppress(asyncio.CancelledError):
        done.exception()
