"""The memory budget of all request bodies together; `max_body_bytes` limits each single body.

A tenant, which is an API key or, without keys, an address, may hold as many bytes of large bodies as it leaves free. So
one tenant gets at most half of the budget, the next at most half of the rest, and a part is always free for another.
"""

from collections import Counter
from collections.abc import Mapping

from service.errors import Overloaded, TooLarge

BODIES = 8  # number of bodies of the largest size that fit into the budget
SMALL = 65_536  # bytes that a body may have even if the budget is exhausted


class Budget:
    """An amount that all tenants share: bytes of bodies, or concurrent calls.

    held: what each tenant holds; without the tenants that hold nothing
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self.held = Counter[str]()

    def change(self, tenant: str, size: int) -> None:
        """Reserve an amount for a tenant, or return it if `size` is negative."""
        self.left -= size
        self.held[tenant] += size
        if not self.held[tenant]:
            del self.held[tenant]

    def exceeded(self, tenant: str) -> bool:
        """Return whether a tenant holds more than is left for the others."""
        return self.held[tenant] > self.left


class MemoryReservation:
    """One request's bytes of the budget, from the first byte of its body until its response is complete.

    A text in Python takes up to four times its bytes.
    """

    def __init__(self, body_memory: Budget, tenant: str) -> None:
        self._budget = body_memory
        self._tenant = tenant
        self._held = 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes that have arrived. Raises Overloaded if a large body's tenant then holds too many."""
        self._budget.change(self._tenant, size)
        self._held += size
        if self._held <= SMALL:
            return
        if self._budget.left < 0:
            raise Overloaded("too many large request bodies are in flight")
        if self._budget.exceeded(self._tenant):
            raise Overloaded(
                "too many large request bodies of this client are in flight: send fewer at once"
            )

    def release(self) -> None:
        """Return all reserved bytes to the budget."""
        self._budget.change(self._tenant, -self._held)
        self._held = 0


def content_length(headers: Mapping[str, str]) -> int:
    """Return the size of a body in bytes from its `Content-Length`; 0 without a valid one."""
    length = headers.get("content-length", "")
    return int(length[:19]) if length.isdecimal() else 0


def check_size(size: int, max_bytes: int) -> None:
    """Check the size of a body in bytes. Raises TooLarge if it exceeds `max_bytes`."""
    if size > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes")
