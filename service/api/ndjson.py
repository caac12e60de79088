"""Newline-delimited JSON: a response that the server sends line by line as results arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.json_responses import dump, pieces
from service.engines.engine import LARGE_BYTES, Engine, EngineTask
from service.engines.task_plan import TaskPlan
from service.scheduling.entries import Heads, Outputs

T = TypeVar("T")

MEDIA_TYPE = "application/x-ndjson"


def wants_lines(accept: str) -> bool:
    """Return whether an `Accept` header lists NDJSON."""
    return any(part.partition(";")[0].strip().lower() == MEDIA_TYPE for part in accept.split(","))


def line(content: object) -> bytes:
    return dump(content) + b"\n"


@dataclass(frozen=True, slots=True)
class InLines(Generic[T]):
    """A task whose results are lines, made in the thread that decodes them."""

    task: EngineTask[T]
    name: str
    show: Callable[[T], object]

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Any, bytes]:
        plan: TaskPlan[Any, Any] = self.task.plan(engine, heads)

        def decode(index: int, item: Any, outputs: list[Outputs]) -> bytes:
            is_large = plan.answer_bytes(index, item) > LARGE_BYTES
            return self.line(index, plan.decode(index, item, outputs), is_large)

        return replace(
            plan, decode=decode, decode_rows=None, result_bytes=plan.result_bytes and len
        )

    def line(self, index: int, result: T | None, is_large: bool = False) -> bytes:
        content = {"index": index, self.name: None if result is None else self.show(result)}
        return b"".join([*pieces(content), b"\n"]) if is_large else line(content)


class NdjsonStream:
    """Queue of lines between the engine and the response. `take` returns all waiting lines together."""

    def __init__(self) -> None:
        self.size = 0  # bytes that wait
        self._waiting: list[bytes] = []
        self._ended = False
        self._more = asyncio.Event()

    def add(self, made: bytes) -> None:
        self._waiting.append(made)
        self.size += len(made)
        self._more.set()

    def end(self) -> None:
        self._ended = True
        self._more.set()

    async def take(self) -> bytes:
        """Return all lines since the last call as soon as there is at least one; empty at the end of the stream."""
        await self._more.wait()
        chunk = b"".join(self._waiting)
        self._waiting.clear()
        self.size = 0
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
