"""Newline-delimited JSON: an answer that is sent as it grows, a line at a time."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "application/x-ndjson"


def wants_lines(accept: str) -> bool:
    """Whether an `Accept` header asks for lines."""
    return any(part.partition(";")[0].strip().lower() == MEDIA_TYPE for part in accept.split(","))


def line(content: object) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


class NdjsonStream:
    """Lines on their way to whoever sends them; what came meanwhile is taken together."""

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
        """What has come since the last time, as soon as there is any; empty at the end."""
        await self._more.wait()
        chunk = b"".join(self._waiting)
        self._waiting.clear()
        if not self._ended:
            self._more.clear()
        return chunk


class NdjsonResponse(Response):
    """Sends chunks as they come."""

    media_type = MEDIA_TYPE

    def __init__(self, chunks: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(
            headers={**headers, "X-Accel-Buffering": "no"}
        )  # nginx sends each line at once
        del self.headers["content-length"]
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
