"""Server-sent events: a response that continues until its client leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.ndjson import NdjsonStream
from service.api.request_body import disconnected
from service.errors import ReplicaLost

UNREAD = 65_536  # bytes that wait for the client; later events are dropped


class EventStream(Response):
    """A response that sends each event as soon as it is available.

    watch: calls a function with the data of each event until it is cancelled. Its error before the first event is that
        of the response
    ended: whether the stream must end, although the client reads it
    """

    media_type = "text/event-stream"

    def __init__(
        self, watch: Callable[[Callable[[bytes], None]], Awaitable[None]], ended: Callable[[], bool]
    ) -> None:
        # The headers make proxies forward each event at once.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._watch = watch
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = NdjsonStream()

        def add(data: bytes) -> None:
            if events.size < UNREAD:
                events.add(b"data: " + data + b"\n\n")

        watching = asyncio.ensure_future(self._watch(add))
        leaving = asyncio.ensure_future(disconnected(receive))
        for end in (watching, leaving):
            end.add_done_callback(lambda _: events.end())
        try:
            chunk = await events.take()
            if watching.done():
                watching.result()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while chunk and not leaving.done() and not self._ended():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await events.take()
            await send({"type": "http.response.body", "body": b""})
            if watching.done():
                with suppress(ReplicaLost):  # the client connects again
                    watching.result()
        finally:
            watching.cancel()
            leaving.cancel()
