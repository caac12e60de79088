"""JSON responses. The bytes of a large one are made in pieces, between which other threads run.

orjson holds the interpreter's lock during a call, so a thread alone would not free the event loop.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

ITEMS = 64  # of a list in one piece: up to 20 ms for vectors of 4,096 numbers


class JsonResponse(Response):
    """A response whose body is made from its content, or from what its content returns, before it is sent."""

    media_type = "application/json"

    def __init__(self, content: Any, headers: Mapping[str, str] | None = None) -> None:
        self._content = content
        self._given = headers

    def finish(self, in_pieces: bool = False) -> None:
        """Make the body and the headers."""
        content = self._content() if callable(self._content) else self._content
        body = b"".join(pieces(content)) if in_pieces else dump(content)
        super().__init__(body, headers=self._given)


def dump(content: object) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def pieces(content: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in small pieces."""
    if isinstance(content, dict) and content:
        for index, (key, value) in enumerate(content.items()):
            yield (b"," if index else b"{") + dump(key) + b":"
            yield from pieces(value)
        yield b"}"
    elif is_list(content) and len(content):
        for start in range(0, len(content), ITEMS):
            yield b"," if start else b"["
            yield from pieces_of_items(content[start : start + ITEMS])
        yield b"]"
    else:
        yield dump(content)


def pieces_of_items(items: Any) -> Iterator[bytes]:
    """Yield the JSON of a list's items, with the commas between them. Nested ones have pieces of their own."""
    if isinstance(items, np.ndarray) or not any(map(is_nested, items)):
        yield dump(items)[1:-1]
        return
    for index, item in enumerate(items):
        yield b"," if index else b""
        yield from pieces(item)


def is_list(content: Any) -> bool:
    """Return whether a value is a list, or an array of rows."""
    return isinstance(content, list | tuple) or getattr(content, "ndim", 1) > 1


def is_nested(content: Any) -> bool:
    if isinstance(content, dict):
        return any(isinstance(one, dict) or is_list(one) for one in content.values())
    return is_list(content)
