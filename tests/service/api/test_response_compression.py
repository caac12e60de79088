import gzip
import threading

import pytest
from starlette.responses import Response

from service.api import response_compression
from service.api.response_compression import SMALL, compress, prefers_gzip

MANY = {"inputs": ["a"] * 200}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", False),
        ("gzip", True),
        ("x-gzip", True),
        ("GZIP", True),
        ("gzip, deflate, br", True),
        ("br;q=1.0, gzip;q=0.8, *;q=0.1", True),
        ("*", True),
        ("*;q=0", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000, *", False),
        ("gzip ; Q=0.5", True),
        ("identity, gzip;q=0.5", False),
        ("identity;q=0.5, gzip", True),
        ("identity;q=0.5, gzip;q=0.5", True),
        ("identity", False),
        ("deflate, br", False),
        ("gzip;q=never", False),
        ("gzip;q=nan", False),
        ("notgzip", False),
    ],
)
def test_weights_decide(header, expected):
    """A client gets gzip if its header accepts gzip, at least as willingly as a body that is not compressed."""
    assert expected is prefers_gzip(header)


@pytest.mark.parametrize("size", [SMALL, SMALL + 1])
async def test_large_bodies_are_compressed_in_a_thread(size, monkeypatch):
    """The event loop compresses small bodies only."""
    threads = []
    pack = response_compression.pack
    monkeypatch.setattr(
        response_compression,
        "pack",
        lambda body: (threads.append(threading.get_ident()), pack(body))[1],
    )
    body = b"x" * size
    response = Response(body)
    await compress(response, "gzip")
    assert body == gzip.decompress(response.body)
    assert str(len(response.body)) == response.headers["content-length"]
    assert (size <= SMALL) == (threads == [threading.get_ident()])


async def test_what_does_not_shrink_stays():
    """A body that gzip makes larger is sent as it is."""
    response = Response(b"ab")
    await compress(response, "gzip")
    assert (b"ab", None) == (response.body, response.headers.get("content-encoding"))


@pytest.mark.parametrize("path", ["/embed", "/metrics"])
async def test_a_large_answer_is_compressed(client_with, path):
    """With the header, the answer is gzip of the same body; without it, the body is as it was. Both vary."""
    async with client_with(gzip_min_bytes=1024) as client:

        async def answer(accept):
            headers = {"Accept-Encoding": accept}
            given = {"json": MANY, "headers": headers} if path == "/embed" else {"headers": headers}
            method = "POST" if path == "/embed" else "GET"
            async with client.stream(method, path, **given) as response:
                return response, b"".join([part async for part in response.aiter_raw()])

        packed, small = await answer("gzip")
        plain, whole = await answer("identity")
    assert (200, "gzip") == (packed.status_code, packed.headers["content-encoding"])
    assert str(len(small)) == packed.headers["content-length"]
    if path == "/embed":
        assert whole == gzip.decompress(small)
    assert len(small) < len(whole) / 2
    assert (200, None) == (plain.status_code, plain.headers.get("content-encoding"))
    assert ["Accept-Encoding"] * 2 == [r.headers["vary"] for r in (packed, plain)]


@pytest.mark.parametrize(
    ("least", "body", "accept"),
    [
        (1_000_000, MANY, "application/json"),
        (0, MANY, "application/json"),
        (1, MANY, "application/x-ndjson"),
    ],
    ids=["small", "switched off", "lines"],
)
async def test_other_answers_are_not_compressed(client_with, least, body, accept):
    """A small answer and a stream of lines are sent as they are; 0 compresses nothing."""
    async with client_with(gzip_min_bytes=least) as client:
        response = await client.post("/embed", json=body, headers={"Accept": accept})
    assert 200 == response.status_code
    assert {"content-encoding", "vary"}.isdisjoint(response.headers)


async def test_head_is_answered_like_get(client_with):
    """HEAD has the headers of GET, also when the answer is compressed."""
    async with client_with(gzip_min_bytes=1024) as client:
        response = await client.head("/metrics", headers={"Accept-Encoding": "gzip"})
    assert (200, "gzip", b"") == (
        response.status_code,
        response.headers["content-encoding"],
        response.content,
    )


async def test_a_page_of_another_origin_gets_both_reasons_to_vary(client_with):
    """`Vary` names the origin and the encoding."""
    async with client_with(gzip_min_bytes=1024, cors_origins="https://a.org") as client:
        response = await client.get("/metrics", headers={"Origin": "https://a.org"})
    assert {"Origin", "Accept-Encoding"} == {*response.headers["vary"].split(", ")}
