"""The memory budget of all request bodies together; `max_body_bytes` limits each single body."""

from collections.abc import Mapping

from service.errors import Overloaded, TooLarge

BODIES = 8  # number of bodies of the largest size that fit into the budget
SMALL = 65_536  # bytes that a body may have even if the budget is exhausted


class MemoryBudget:
    """Bytes available to all bodies together. A text in Python takes up to four times its bytes."""

    def __init__(self, size: int) -> None:
        self.left = size


class MemoryReservation:
    """One request's part of the budget, from the first byte of its body until its response is complete."""

    def __init__(self, body_memory: MemoryBudget) -> None:
        self._budget = body_memory
        self._held = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes. Raises Overloaded if a large body exceeds the budget."""
        self._budget.left -= size
        self._held += size
        if self._budget.left < 0 and self._held > SMALL:
            raise Overloaded("as many large bodies are in work as there is room for")

    def release(self) -> None:
        """Return all reserved bytes to the budget."""
        self._budget.left += self._held
        self._held = 0


def content_length(headers: Mapping[str, str]) -> int:
    """Return the size of a body in bytes from its `Content-Length`; 0 without a valid one."""
    length = headers.get("content-length", "")
    return int(length[:19]) if length.isdecimal() else 0


def check_size(size: int, max_bytes: int) -> None:
    """Check the size of a body in bytes. Raises TooLarge if it exceeds `max_bytes`."""
    if size > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes")
