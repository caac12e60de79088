import asyncio
import gzip
import random
import zlib

import pytest
from starlette.types import Message

from service.api.decompression import STEP, Inflater
from service.errors import BadRequest, QuartetError, TooLarge, UnsupportedEncoding
from tests.service.api.test_request_body import JSON, chunk
from tests.service.api.test_request_body import read as read_json

BODY = b'{"inputs": "%s"}' % (b"a small comet, drawn by Ada; " * 3)
GZIP = gzip.compress(BODY, mtime=0)
HEADER_BYTES = 10  # of gzip, which say when and where it was made

EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"  # of no bytes, and not the last one; RFC 1951, 3.2.4


async def read(*parts: bytes, encoding: str = "gzip", max_bytes: int = 10_000) -> object:
    """What comes of a body that arrives in these parts."""
    messages: list[Message] = [chunk(part, more=True) for part in parts] + [chunk(b"")]
    headers = {**JSON, "content-encoding": encoding}
    return await read_json(*messages, headers=headers, max_bytes=max_bytes)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", GZIP),
        ("x-gzip", GZIP),
        (" GZip ", GZIP),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
        ("", BODY),
    ],
)
async def test_compressed_bodies_are_read(encoding, body):
    """At once or byte by byte, it is the same body."""
    plain = await read(BODY, encoding="identity")
    assert plain == await read(body, encoding=encoding)
    assert plain == await read(*(bytes([byte]) for byte in body), encoding=encoding)


@pytest.mark.parametrize("size", [STEP - 1, STEP, STEP + 1, 3 * STEP])
def test_large_bodies_come_in_pieces(size):
    """However they are cut, the pieces are the body, and none is larger than a step."""
    body = random.Random(size).randbytes(size // 2) + b"\0" * (size - size // 2)
    stream = Inflater("gzip")
    pieces = [*stream.feed(gzip.compress(body))]
    stream.finish()
    assert body == b"".join(pieces)
    assert max(map(len, pieces)) <= STEP


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "deflate,br", "x"])
async def test_other_encodings_are_refused_unread(encoding):
    """The answer names those that are read."""
    with pytest.raises(UnsupportedEncoding, match="gzip, deflate") as caught:
        await read(GZIP, encoding=encoding)
    assert {"Accept-Encoding": "gzip, deflate"} == caught.value.headers
    assert "Content-Encoding" == caught.value.param


async def test_a_bomb_is_refused_as_soon_as_it_is_too_large():
    """A body is not inflated beyond its limit by more than a step."""
    bomb = gzip.compress(b"\0" * 50_000_000)
    stream = Inflater("gzip")
    assert STEP == len(next(stream.feed(bomb)))
    with pytest.raises(TooLarge):
        await read(bomb, max_bytes=100_000)


async def test_what_inflates_to_nothing_is_too_large_in_the_end():
    """A stream without output may continue for ever, so its compressed bytes are counted, too."""
    stream = Inflater("gzip")
    parts = [GZIP[:HEADER_BYTES], *[EMPTY_BLOCK] * 1000]
    assert b"" == b"".join(piece for part in parts for piece in stream.feed(part))
    with pytest.raises(TooLarge):
        await read(*parts, max_bytes=1000)


async def test_the_very_limit_may_be_inflated():
    """The limit itself is allowed, one byte more is not."""
    assert await read(GZIP, max_bytes=len(BODY)) == await read(GZIP)
    with pytest.raises(TooLarge):
        await read(GZIP, max_bytes=len(BODY) - 1)


async def test_a_torn_stream_is_a_bad_request():
    """Wherever it ends too soon."""
    for end in range(len(GZIP)):
        with pytest.raises(BadRequest, match="ends before the end of its gzip stream"):
            await read(GZIP[:end])


async def test_a_corrupt_stream_is_a_bad_request():
    """Whatever bit is changed in what it carries or in its checksum, but for some that fill up a byte."""
    harmless = 0
    for place in range(8 * HEADER_BYTES, 8 * len(GZIP)):
        corrupt = bytearray(GZIP)
        corrupt[place // 8] ^= 1 << place % 8
        try:
            assert await read(bytes(corrupt)) == await read(GZIP)
            harmless += 1
        except BadRequest:
            pass
    assert harmless < 8


@pytest.mark.parametrize("rest", [b"x", GZIP], ids=["a-byte", "another-stream"])
async def test_what_goes_on_behind_its_stream_is_a_bad_request(rest):
    """One stream is one body; thousands of empty ones would be work for nothing."""
    for parts in ((GZIP + rest,), (GZIP, rest)):
        with pytest.raises(BadRequest, match="continues after its gzip stream"):
            await read(*parts)


@pytest.mark.parametrize(
    ("encoding", "body"), [("gzip", BODY), ("gzip", zlib.compress(BODY)), ("deflate", GZIP)]
)
async def test_another_format_is_a_bad_request(encoding, body):
    """What the header promises is what is there."""
    with pytest.raises(QuartetError, match=f"the body is not {encoding}") as caught:
        await read(body, encoding=encoding)
    assert 400 == caught.value.status


async def test_others_have_their_turn_while_a_large_body_is_inflated():
    """Between two steps the event loop goes on."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    large = gzip.compress(b'{"inputs": "%s"}' % (b"a" * 20 * STEP))
    await read(large, max_bytes=30 * STEP)
    counting.cancel()
    assert turns >= 20
