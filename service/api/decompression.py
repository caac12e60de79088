"""Decompression of request bodies in small pieces, so that the caller can reject an oversized body early."""

import zlib
from collections.abc import Iterator

from service.errors import BadRequest, UnsupportedEncoding

STEP = 262_144  # bytes of output per inflate step, about a millisecond
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's `wbits` for each format
ACCEPTED = "gzip, deflate"


class Inflater:
    """Decompressor of one body. Call `feed` for each received chunk and `finish` at the end of the body."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the inflated data in pieces of at most `STEP` bytes.

        Raises BadRequest if the data is not a valid stream.
        """
        while data:
            if self._stream.eof:
                raise BadRequest(f"the body continues after its {self._encoding} stream")
            try:
                piece = self._stream.decompress(data, STEP)
            except zlib.error as error:
                raise BadRequest(f"the body is not {self._encoding}: {error}") from None
            data = self._stream.unconsumed_tail or self._stream.unused_data
            yield piece

    def finish(self) -> None:
        """Check that the stream is complete. Raises BadRequest if it is truncated."""
        if not self._stream.eof:
            raise BadRequest(f"the body ends before the end of its {self._encoding} stream")


def inflater(content_encoding: str) -> Inflater | None:
    """Return an inflater for a body's encoding, or None if the body is not encoded. Raises UnsupportedEncoding."""
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
