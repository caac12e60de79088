"""Compressed answers: gzip for clients that accept it, where an answer is large enough.

Streams of lines are not compressed: each line would have to be flushed, which loses most of the gain, and a proxy that
compresses them can be added. On vectors, level 1 takes a tenth of the
time of the usual level 6, for an eighth more bytes.
"""

import asyncio
import zlib

from starlette.responses import Response

LEVEL = 1
GZIP = 31  # as zlib names the format, with its largest window
SMALL = 32_768  # bytes that are compressed on the event loop, in about 0.2 ms; more take a thread
NAMES = frozenset({"gzip", "x-gzip"})


async def compress(response: Response, accept_encoding: str) -> None:
    """Compress the body of a response in place if `Accept-Encoding` prefers gzip to the body as it is."""
    response.headers.add_vary_header("Accept-Encoding")
    if not prefers_gzip(accept_encoding):
        return
    body = bytes(response.body)
    packed = pack(body) if len(body) <= SMALL else await asyncio.to_thread(pack, body)
    if len(packed) < len(body):
        response.body = packed
        response.headers["Content-Encoding"] = "gzip"
        response.headers["Content-Length"] = str(len(packed))


def pack(body: bytes) -> bytes:
    stream = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
    return stream.compress(body) + stream.flush()


def prefers_gzip(accept_encoding: str) -> bool:
    """Whether a header accepts gzip, and at least as willingly as a body that is not compressed (RFC 9110, 12.5.3)."""
    weights: dict[str, float] = {}
    for part in accept_encoding.lower().split(","):
        coding, *parameters = (piece.strip() for piece in part.split(";"))
        weights["gzip" if coding in NAMES else coding] = weight(parameters)
    gzip = weights.get("gzip", weights.get("*", 0.0))
    return gzip > 0 and gzip >= weights.get("identity", 0.0)


def weight(parameters: list[str]) -> float:
    """The `q` among a coding's parameters: 1 where there is none, 0 where it is no number."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
