"""What one process of the service serves with, and the timeout that a request has there."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from service.engines.registry import Engines
from service.errors import Draining, InvalidInput, NotReady
from service.middleware.body_memory import BODIES, MemoryBudget
from service.observability.metrics import Recorder
from service.settings import Settings

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MILLISECONDS = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(slots=True)
class Service:
    """What this process serves with; `engines` is there while they are open."""

    settings: Settings
    metrics: Recorder
    engines: Engines | None = None
    leaving: bool = False  # clients should go elsewhere; requests are still answered
    draining: bool = False
    body_memory: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.body_memory = MemoryBudget(BODIES * self.settings.max_body_bytes)

    def open_engines(self) -> Engines:
        """Raises NotReady before the engines are open, Draining once they are closed."""
        if self.engines is None:
            self.refuse_draining()
            raise NotReady("the bundles are still being opened")
        return self.engines

    def check_ready(self) -> None:
        """Raises NotReady or Draining unless new requests should be sent here."""
        if self.leaving:
            raise Draining("the server is about to shut down")
        self.refuse_draining()
        if problem := self.open_engines().load().problem:
            raise NotReady(problem)

    def check_alive(self) -> None:
        """Raises NotReady when only a restart can help."""
        if self.engines is not None and not self.draining and not self.engines.alive():
            raise NotReady(self.engines.load().problem)

    def refuse_draining(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down")


def timeout_s(headers: Mapping[str, str], settings: Settings) -> float:
    """The client's patience in seconds, at most the server's. Raises InvalidInput for what is no number of them."""
    header = headers.get(TIMEOUT_HEADER.lower())
    if header is None:
        return settings.deadline_ms / 1000
    if not MILLISECONDS.fullmatch(header):
        raise InvalidInput(
            f"{TIMEOUT_HEADER}: must be a whole number of milliseconds, at least 1",
            param=TIMEOUT_HEADER,
        )
    return min(int(header), settings.deadline_ms) / 1000
