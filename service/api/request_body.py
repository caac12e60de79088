"""Reads a request body from the connection and parses its JSON, and limits the wait for the response.

The module uses `receive` alone. The framework's own reader answers 500 to NaN, accepts lone surrogates, and continues
to work for clients that have disconnected.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.types import Receive

from service.api.decompression import Inflater, inflater
from service.errors import (
    BadRequest,
    ClientDisconnected,
    DeadlineExceeded,
    RequestTimeout,
    TooLarge,
    UnsupportedMediaType,
)
from service.middleware.body_memory import check_size, content_length

T = TypeVar("T")

SHOWN = 64  # characters of a client's own text that an error message repeats
VALUES = (
    32  # commas of a body for each of its parts: numbers cost little, a string, list or object much
)
STRUCTURE = b'",[{'
TEXT = bytes(set(range(256)) - set(STRUCTURE))
STRING = re.compile(rb'"[^"]*"')


async def read_body(
    headers: Mapping[str, str],
    receive: Receive,
    *,
    max_bytes: int,
    timeout_s: float,
    deadline: float = math.inf,
    take: Callable[[int], None],
) -> bytes:
    """Read one body, within `timeout_s` and until `deadline` (`time.monotonic`).

    The body may be compressed; `max_bytes` then limits both its compressed and its inflated size. The function calls
    `take` with the size of each piece.

    Raises UnsupportedEncoding, TooLarge (before reading if `Content-Length` exceeds the limit), RequestTimeout,
    DeadlineExceeded, BadRequest and ClientDisconnected, and the errors of `take`.
    """
    inflate = inflater(headers.get("content-encoding", ""))
    check_size(content_length(headers), max_bytes)
    with body_timeout(timeout_s, deadline):
        return await read_bytes(receive, max_bytes, inflate, take)


def body_timeout(timeout_s: float, deadline: float) -> "TaskTimeout":
    """Return the time limit of a body. It raises RequestTimeout or, if `deadline` is earlier, DeadlineExceeded."""
    left_s = seconds_left(deadline)
    late: Callable[[], Exception]
    if left_s < timeout_s:
        late = partial(DeadlineExceeded, "the body did not arrive before the deadline")
    else:
        late = partial(RequestTimeout, f"the body did not arrive within {timeout_s:g} s")
    return TaskTimeout(min(timeout_s, left_s), late)


def check_media_type(headers: Mapping[str, str]) -> None:
    content_type = headers.get("content-type", "")
    if content_type == "application/json":
        return
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if not is_json(media_type):
        raise UnsupportedMediaType(
            f"Content-Type must be application/json, not {media_type[:SHOWN] or 'missing'}",
            param="Content-Type",
        )
    if any(part.startswith("charset=") and not is_utf8(part) for part in parameters):
        raise UnsupportedMediaType("the charset must be utf-8", param="Content-Type")


def is_json(media_type: str) -> bool:
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )


def is_utf8(parameter: str) -> bool:
    return parameter.removeprefix("charset=").strip("\"' ") in ("utf-8", "utf8")


async def read_bytes(
    receive: Receive, max_bytes: int, inflate: Inflater | None, take: Callable[[int], None]
) -> bytes:
    chunks: list[bytes] = []
    received = size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        more = message.get("more_body", False)
        data = message.get("body", b"")
        received += len(data)
        check_size(received, max_bytes)
        for piece in inflate.feed(data) if inflate else (data,):
            chunks.append(piece)
            size += len(piece)
            check_size(size, max_bytes)
            take(len(piece))
            if inflate:
                await asyncio.sleep(0)  # lets other tasks run
    if inflate:
        inflate.finish()
    return b"".join(chunks)


def check_parts(body: bytes, most: int) -> None:
    """Reject a body with more than `most` strings, lists and objects, or too many other values. Raises TooLarge.

    Parsing 10 MB of empty lists blocks the event loop for 0.7 s; this check takes 0.01 s. Characters inside strings do
    not count.
    """
    if b"\\" in body:  # removes escapes, so that the remaining quotes delimit strings
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    skeleton = body.translate(None, TEXT)
    if len(skeleton) <= most:
        return
    strings = skeleton.count(b'"') // 2
    outside = STRING.sub(b"", skeleton) if strings <= most else b""
    if strings + outside.count(b"[") + outside.count(b"{") > most:
        raise TooLarge(f"the body has more than {most} strings, lists and objects: send fewer")
    if outside.count(b",") > VALUES * most:
        raise TooLarge(f"the body has more than {VALUES * most} values: send fewer")


async def parse_limited(body: bytes, max_parts: int) -> object:
    """Parse a JSON body with at most `max_parts` strings, lists and objects. Raises TooLarge and BadRequest."""
    if len(body) > max_parts:
        check_parts(body, max_parts)
        await asyncio.sleep(0)  # lets other tasks run
    return parse_json(body)


def parse_json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(describe_json_error(body, error)) from None


def describe_json_error(body: bytes, error: orjson.JSONDecodeError) -> str:
    if not body:
        return "the body is empty"
    try:
        body.decode()
    except UnicodeDecodeError as undecodable:
        return f"the body is not UTF-8: invalid byte at position {undecodable.start}"
    return f"the body is not valid JSON: {error}"


async def answer_in_time(
    work: Coroutine[Any, Any, T],
    receive: Receive,
    deadline: float,
    leaving: asyncio.Future[None] | None = None,
) -> T:
    """Await `work` until it is done, the client disconnects or `deadline` passes.

    `deadline` is in seconds of `time.monotonic`. `leaving` is done when the client has disconnected. Without it, the
    function calls `receive`, which must have returned the whole body. If `work` does not finish first, the function
    cancels and awaits it, so that its queued entries are dropped. Raises ClientDisconnected, DeadlineExceeded and the
    errors of `work`.
    """
    late = partial(DeadlineExceeded, "the answer was not ready in time")
    watched = leaving or asyncio.ensure_future(disconnected(receive))
    with TaskTimeout(seconds_left(deadline), late) as limit:

        def leave(_: asyncio.Future[None]) -> None:
            limit.end(ClientDisconnected)

        watched.add_done_callback(leave)
        try:
            return await work
        finally:
            watched.remove_done_callback(leave)
            if leaving is None:
                watched.cancel()


class TaskTimeout:
    """Context manager that ends the current task's block with an error after some seconds, or earlier through `end`.

    It cancels the task, as `asyncio.timeout` does. In contrast to that, it can be ended early, and it costs half as
    much.
    """

    __slots__ = ("_asking", "_cancelling", "_error", "_late", "_seconds", "_timer")

    def __init__(self, seconds: float, late: Callable[[], Exception]) -> None:
        self._seconds = seconds
        self._late = late
        self._error: Callable[[], Exception] | None = None

    def __enter__(self) -> "TaskTimeout":
        asking = asyncio.current_task()
        assert asking is not None, "our bug: no task waits for the body"
        self._asking, self._cancelling = asking, asking.cancelling()
        self._timer = asking.get_loop().call_later(self._seconds, self.end, self._late)
        return self

    def end(self, error: Callable[[], Exception]) -> None:
        """End the block with such an error, unless another error already ends it."""
        if self._error is None:
            self._error = error
            self._asking.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._error is None or self._asking.uncancel() > self._cancelling:
            return  # the timeout has not fired, or other code also cancels the task
        if kind is asyncio.CancelledError:
            raise self._error() from None


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def seconds_left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
