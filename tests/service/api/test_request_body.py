import asyncio
import time
from typing import Any

import orjson
import pytest
from starlette.types import Message, Receive

from service.api.request_body import (
    TaskTimeout,
    answer_in_time,
    check_media_type,
    check_parts,
    parse_limited,
    read_body,
)
from service.api.schemas import most_parts
from service.errors import (
    BadRequest,
    ClientDisconnected,
    DeadlineExceeded,
    RequestTimeout,
    TooLarge,
    UnsupportedMediaType,
)

JSON = {"content-type": "application/json"}
GONE: Message = {"type": "http.disconnect"}


def chunk(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def receiving(*messages: Message) -> Receive:
    """A client that says these things and then stays, silent."""
    left = iter(messages)

    async def receive() -> Message:
        for message in left:
            return message
        return await asyncio.Future()

    return receive


def freely(size: int) -> None:
    """There is room for any number of bytes."""


async def read(
    *messages: Message, headers: dict[str, str] = JSON, max_parts: int = 100, **options: Any
) -> object:
    """Read and parse a JSON body as the routes do."""
    check_media_type(headers)
    limits = {"max_bytes": 100, "timeout_s": 5, "take": freely, **options}
    return await parse_limited(await read_body(headers, receiving(*messages), **limits), max_parts)


async def test_a_body_after_the_deadline_is_too_late():
    """A client's own patience counts while its body is still on the way."""
    with pytest.raises(DeadlineExceeded):
        await read(chunk(b"[", more=True), deadline=time.monotonic() + 0.01)


async def test_a_body_is_late_by_the_limit_that_is_nearer(monkeypatch):
    """However exact the clock is that says so."""
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    for deadline, error in ((0.01, DeadlineExceeded), (60, RequestTimeout)):
        with pytest.raises(error):
            await read(timeout_s=0.02, deadline=deadline)


async def test_chunks_become_one_body():
    """A body may arrive in chunks, and the callback gets the size of each."""
    taken = []
    assert await read(chunk(b'{"a":', more=True), chunk(b"1}"), take=taken.append) == {"a": 1}
    assert [5, 2] == taken


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON; charset=UTF-8", "application/vnd.api+json"],
)
async def test_json_types_are_read(content_type):
    """JSON by any of its names, in UTF-8."""
    assert await read(chunk(b"[1]"), headers={"content-type": content_type}) == [1]


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({}, "Content-Type"),
        ({"content-type": "text/plain"}, "Content-Type"),
        ({"content-type": "application/json; charset=latin-1"}, "Content-Type"),
        ({**JSON, "content-encoding": "br"}, "Content-Encoding"),
    ],
)
async def test_other_types_are_refused_unread(headers, param):
    """What is no plain JSON in UTF-8 is refused before a byte is read."""
    with pytest.raises(UnsupportedMediaType) as caught:
        await read(headers=headers)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON: unexpected end of data"),
        (b"[NaN]", "not valid JSON"),
        (b"[1e999]", "not valid JSON"),
        (b'["\\ud800"]', "not valid JSON"),
        (b'["\xff"]', "not UTF-8: invalid byte at position 2"),
        (b"[" * 2000, "not valid JSON"),
    ],
    ids=["empty", "cut", "nan", "infinite", "lone-surrogate", "not-utf8", "deep"],
)
async def test_what_is_no_json_is_a_bad_request(body, message):
    """A malformed body is the client's fault, and the message has the position."""
    with pytest.raises(BadRequest, match=message):
        await read(chunk(body), max_bytes=5000, max_parts=5000)


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([], {"headers": {**JSON, "content-length": "101"}}, TooLarge),
        ([chunk(b"x" * 60, more=True)] * 2, {}, TooLarge),
        ([chunk(b"[", more=True)], {"timeout_s": 0.01}, RequestTimeout),
        ([chunk(b"[", more=True), GONE], {}, ClientDisconnected),
    ],
    ids=["long", "long without length", "slow", "client leaves"],
)
async def test_a_body_is_not_read_to_its_end(messages, options, error):
    """Reading ends at the first byte above the limit, at the time limit, and when the client leaves."""
    with pytest.raises(error):
        await read(*messages, **options)


async def test_a_body_of_the_very_limit_is_read():
    """The limit itself is allowed."""
    assert await read(chunk(b"[1]"), headers={**JSON, "content-length": "3"}, max_bytes=3) == [1]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (b"[[],[],[]]", 4),
        (b'{"inputs": ["a", "b"], "top_k": 1}', 6),
        (b"[1, 2.5, null, true, [], {}]", 3),
        (rb'["a, b: [c] {d}", "\"e\", f", "\\", ",\\\",", "\u002c,\n,"]', 6),
        ('["é, 中, \U0001f600", ","]'.encode(), 3),
        (b'{"": ""}', 3),
    ],
)
async def test_a_body_of_many_parts_is_too_large(body, parts):
    """Strings, lists and objects are counted, except within strings."""
    with pytest.raises(TooLarge, match=r"more than .* strings, lists and objects"):
        await read(chunk(body), max_parts=parts - 1)
    check_parts(body, parts)


async def test_token_ids_are_no_parts():
    """Every input of a request may have a whole window of them."""
    ids = [[30522] * 512] * 1024
    body = orjson.dumps({"input": ids})
    read_ids = await read(chunk(body), max_parts=most_parts(1024), max_bytes=10_000_000)
    assert {"input": ids} == read_ids
    with pytest.raises(TooLarge, match="more than 320 values"):
        await read(chunk(orjson.dumps([1] * 322)), max_parts=10, max_bytes=1000)


async def test_parts_are_counted_before_anything_is_made_of_them():
    """A body that would take long to parse is refused soon, though it is broken at its end."""
    with pytest.raises(TooLarge):
        await read(chunk(b"[" + b"[]," * 1_000_000), max_parts=1000, max_bytes=10_000_000)


async def test_text_is_no_part():
    """A large body of few texts is read, whatever these hold."""
    text = ',:[{\\"\n' * 100_000
    body = orjson.dumps([text, text])
    assert [text, text] == await read(chunk(body), max_parts=10, max_bytes=10_000_000)


class Work:
    """Work that never ends by itself, and knows whether it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def run(self) -> None:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_an_answer_in_time_is_returned():
    """Neither the client nor the clock disturbs work that is done."""

    async def work():
        return "done"

    assert await answer_in_time(work(), receiving(), time.monotonic() + 5) == "done"


async def test_a_failure_is_passed_on():
    """What the work raises is raised."""

    async def work():
        raise TooLarge("no")

    with pytest.raises(TooLarge):
        await answer_in_time(work(), receiving(), time.monotonic() + 5)


@pytest.mark.parametrize(
    ("messages", "patience_s", "error"),
    [((GONE,), 5.0, ClientDisconnected), ((), 0.01, DeadlineExceeded), ((), -1, DeadlineExceeded)],
    ids=["client-leaves", "deadline-passes", "deadline-has-passed"],
)
async def test_work_without_a_client_is_canceled(messages, patience_s, error):
    """When the client goes or the time is up, the work is cancelled before the error is raised."""
    work = Work()
    with pytest.raises(error):
        await answer_in_time(work.run(), receiving(*messages), time.monotonic() + patience_s)
    assert work.cancelled


async def test_a_server_that_reports_disconnects_is_not_polled():
    """It detects a connection that was lost before `receive` could be awaited."""
    work, leaving = Work(), asyncio.get_running_loop().create_future()

    async def receive():
        raise AssertionError("asked")

    waiting = asyncio.create_task(
        answer_in_time(work.run(), receive, time.monotonic() + 5, leaving)
    )
    await asyncio.sleep(0)
    leaving.set_result(None)
    with pytest.raises(ClientDisconnected):
        await waiting
    assert work.cancelled


async def test_a_task_canceled_at_its_deadline_is_canceled():
    """The canceling code waits for the task; a deadline alone leaves the task as it was."""

    async def work(others):
        with TaskTimeout(60, DeadlineExceeded) as limit:
            limit.end(ClientDisconnected)
            limit.end(TooLarge)  # too late: it ends already
            for _ in range(others):
                task.cancel()
            await asyncio.sleep(60)

    task = asyncio.create_task(work(others=0))
    with pytest.raises(ClientDisconnected):
        await task
    assert not task.cancelling()
    task = asyncio.create_task(work(others=1))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_the_wait_cancels_the_work():
    """A server that gives up takes the work with it."""
    work = Work()
    waiting = asyncio.create_task(answer_in_time(work.run(), receiving(), time.monotonic() + 5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.cancelled
