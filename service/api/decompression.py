"""Compressed bodies, inflated as they come: a little at a time, so that what they become can be refused in time."""

import zlib
from collections.abc import Iterator

from service.errors import BadRequest, UnsupportedEncoding

STEP = 262_144  # bytes that are inflated at once, in about a millisecond
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # as zlib tells the formats apart
ACCEPTED = "gzip, deflate"


class Inflater:
    """One body's stream: `feed` it as it comes, and `finish` when it has ended."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What it becomes, in pieces of `STEP` bytes at most. Raises BadRequest where it is no such stream."""
        while data:
            if self._stream.eof:
                raise BadRequest(f"the body goes on behind its {self._encoding} stream")
            try:
                piece = self._stream.decompress(data, STEP)
            except zlib.error as error:
                raise BadRequest(f"the body is not {self._encoding}: {error}") from None
            data = self._stream.unconsumed_tail or self._stream.unused_data
            yield piece

    def finish(self) -> None:
        """Raises BadRequest when there should be more."""
        if not self._stream.eof:
            raise BadRequest(f"the body ends before its {self._encoding} stream does")


def inflater(content_encoding: str) -> Inflater | None:
    """What undoes a body's encoding; None when it has none. Raises UnsupportedEncoding."""
    encoding = content_encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in WINDOW_BITS:
        raise UnsupportedEncoding(
            f"send the body as it is, or in one of: {ACCEPTED}",
            param="Content-Encoding",
            accepted=ACCEPTED,
        )
    return Inflater(encoding)
