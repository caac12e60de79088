"""Answers in lines: asked for by the Accept header, sent as they come, ended by a summary or an error."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from service import errors
from service.api.ndjson import MEDIA_TYPE, NdjsonStream, line, wants_lines
from tests.service.api.test_native_routes import BODIES, USAGE
from tests.service.fakes import TOKENS, VECTOR

IN_LINES = {"Accept": MEDIA_TYPE}
SUMMARY = {"model": "tiny@1", "usage": USAGE}


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert (200, MEDIA_TYPE) == (response.status_code, response.headers["Content-Type"])
    assert response.text.endswith("\n")
    return [json.loads(text) for text in response.text.splitlines()]


@pytest.mark.parametrize(
    ("accept", "lines"),
    [
        ("application/x-ndjson", True),
        ("text/html, Application/X-NDJSON;q=0.9", True),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/x-ndjson-seq", False),
    ],
)
def test_the_accept_header_selects_ndjson(accept, lines):
    """One JSON object is the default, also where anything is accepted."""
    assert lines is wants_lines(accept)


async def test_what_came_meanwhile_is_taken_together():
    """Waiting lines are sent at once, and the end after them."""
    lines = NdjsonStream()
    lines.add(line({"index": 1}))
    lines.add(line({"index": 0}))
    assert b'{"index":1}\n{"index":0}\n' == await lines.take()
    taking = asyncio.create_task(lines.take())
    await asyncio.sleep(0)
    assert not taking.done()
    lines.add(line([]))
    assert b"[]\n" == await taking
    lines.add(line(7))
    lines.end()
    assert [b"7\n", b"", b""] == [await lines.take() for _ in range(3)]


# The routes whose results do not need all inputs.
each_task = pytest.mark.parametrize("path", sorted(BODIES.keys() - {"/rerank", "/similarity"}))


@each_task
async def test_each_result_has_a_line(client, path):
    """The lines contain what the one object would contain, and the last line sums up."""
    body = BODIES[path] if path == "/qa" else {**BODIES[path], "inputs": ["a", "b"]}
    whole = (await client.post(path, json=body)).json()
    *results, summary = lines_of(await client.post(path, json=body, headers=IN_LINES))
    names = ("embedding", "embeddings") if path.startswith("/embed") else ("result", "results")
    assert [
        {"index": index, names[0]: result} for index, result in enumerate(whole[names[1]])
    ] == results
    heads = {name: whole[name] for name in ("head", "heads") if name in whole}
    assert {**SUMMARY, **heads} == summary


async def test_a_proxy_is_to_pass_each_line_on(client):
    """nginx buffers answers unless a header of the answer switches that off."""
    response = await client.post("/embed", json={"inputs": "a"}, headers=IN_LINES)
    assert "no" == response.headers["X-Accel-Buffering"]
    whole = await client.post("/embed", json={"inputs": "a"})
    assert "X-Accel-Buffering" not in whole.headers


async def test_bad_inputs_have_lines_and_are_named_at_the_end(client, engine):
    """With `on_error: null` a bad input has a line with null, and its reason in the last line."""
    engine.bad = {0: errors.InvalidInput("too long")}
    body = {"inputs": ["a", "b"], "on_error": "null"}
    whole = (await client.post("/ner", json=body)).json()
    bad, good, summary = lines_of(await client.post("/ner", json=body, headers=IN_LINES))
    assert {"index": 0, "result": None} == bad
    assert {"index": 1, "result": whole["results"][1]} == good
    assert whole["errors"] == summary["errors"]
    assert [0] == [error["index"] for error in whole["errors"]]


async def test_vectors_in_lines_may_be_base64(client):
    """The options of a body apply to each line."""
    body = {"inputs": "a", "encoding_format": "base64"}
    first, _ = lines_of(await client.post("/embed", json=body, headers=IN_LINES))
    assert isinstance(first["embedding"], str)


@each_task
async def test_what_fails_at_once_has_its_status(client, engine, path):
    """An error before the first line is an error like any other."""
    engine.error, engine.tell_first = errors.Overloaded("full", retry_after_s=3), 0
    engine.answer = failing(engine.error)
    response = await client.post(path, json=BODIES[path], headers=IN_LINES)
    assert (429, "3") == (response.status_code, response.headers["Retry-After"])
    assert "overloaded" == response.json()["error"]["code"]


def failing(error: Exception) -> Any:
    async def answer(*_: object) -> None:
        raise error

    return answer


async def test_what_fails_later_is_the_last_line(client, engine, lines):
    """Lines that were sent stay; the error follows, and the log names it."""
    engine.error, engine.tell_first = errors.DeadlineExceeded("too late"), 1
    response = await client.post("/embed", json={"inputs": ["a", "b"]}, headers=IN_LINES)
    first, last = lines_of(response)
    assert {"index": 0, "embedding": VECTOR.tolist()} == first
    assert {"error": {"code": "deadline_exceeded", "message": "too late", "param": None}} == last
    (said,) = [told for told in lines if told["event"] == "request"]
    assert (200, "deadline_exceeded") == (said["status"], said["code"])


async def test_our_bugs_are_logged(client, engine, lines):
    """An inference that fails midway leaves its traceback in the log, as it does elsewhere."""
    engine.error = errors.InferenceFailed("no number")
    await client.post("/embed", json={"inputs": "a"}, headers=IN_LINES)
    assert ["no number"] == [told["event"] for told in lines if told["log_level"] == "error"]


async def test_lines_leave_before_the_answer_is_whole(app, engine, lines):
    """A line is sent when its result is ready; a disconnect cancels the other inputs, and the work done is charged."""
    engine.hold = asyncio.Event()
    gone = asyncio.Event()
    sent = asyncio.Queue()
    body = [{"type": "http.request", "body": b'{"inputs": ["a", "b"]}'}]

    async def receive():
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/embed",
        "raw_path": b"/embed",
        "query_string": b"",
        "headers": [(b"accept", MEDIA_TYPE.encode()), (b"content-type", b"application/json")],
    }
    async with app.router.lifespan_context(app):
        asked = asyncio.create_task(app(scope, receive, sent.put))
        start, chunk = await sent.get(), await sent.get()
        assert 200 == start["status"]
        assert b"content-length" not in dict(start["headers"])
        expected = [line({"index": i, "embedding": VECTOR}) for i in range(2)]
        assert b"".join(expected) == chunk["body"]
        assert chunk["more_body"]
        assert not asked.done()
        gone.set()
        await asked
    assert engine.cancelled.is_set()
    (told,) = [told for told in lines if told["event"] == "request"]
    assert TOKENS == told["tokens"]
