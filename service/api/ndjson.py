"""Newline-delimited JSON: a response that the server sends line by line as results arrive."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "application/x-ndjson"


def wants_lines(accept: str) -> bool:
    """Return whether an `Accept` header lists NDJSON."""
    return any(part.partition(";")[0].strip().lower() == MEDIA_TYPE for part in accept.split(","))


def line(content: object) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


class NdjsonStream:
    """Queue of lines between the engine and the response. `take` returns all waiting lines together."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._ended = False
        self._more = asyncio.Event()

    def add(self, content: object) -> None:
        self._waiting.append(line(content))
        self._more.set()

    def end(self) -> None:
        self._ended = True
        self._more.set()

    async def take(self) -> bytes:
        """Return all lines since the last call as soon as there is at least one; empty at the end of the stream."""
        await self._more.wait()
        chunk = b"".join(self._waiting)
        self._waiting.clear()
        if not self._ended:
            self._more.clear()
        return chunk


class NdjsonResponse(Response):
    """A response that sends each chunk as soon as it is available."""

    media_type = MEDIA_TYPE

    def __init__(self, chunks: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        # The header makes nginx forward each line at once.
        super().__init__(headers={**headers, "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
