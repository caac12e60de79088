"""The memory that requests take by their bodies: bounded for all together, as `max_body_bytes` bounds each."""

from collections.abc import Mapping

from service.errors import Overloaded, TooLarge

BODIES = 8  # of the largest size, that are in work at once
SMALL = 65_536  # bytes that a body may have however little room there is


class MemoryBudget:
    """Bytes that all bodies together may have; a text in Python takes up to four times as much."""

    def __init__(self, size: int) -> None:
        self.left = size


class MemoryReservation:
    """One request's part of the room, from its first byte until it is answered."""

    def __init__(self, body_memory: MemoryBudget) -> None:
        self._budget = body_memory
        self._held = 0

    def take(self, size: int) -> None:
        """Raises Overloaded where a large body finds no room for more of it."""
        self._budget.left -= size
        self._held += size
        if self._budget.left < 0 and self._held > SMALL:
            raise Overloaded("as many large bodies are in work as there is room for")

    def release(self) -> None:
        """Give all of it back."""
        self._budget.left += self._held
        self._held = 0


def content_length(headers: Mapping[str, str]) -> int:
    """The bytes of a body by its `Content-Length`; 0 where there is none."""
    length = headers.get("content-length", "")
    return int(length[:19]) if length.isdecimal() else 0


def check_size(size: int, max_bytes: int) -> None:
    """Raises TooLarge for a body of more than `max_bytes`."""
    if size > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes")
