"""The state of one process of the service, and the timeout of a request."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from service.engines.registry import Engines
from service.errors import Draining, InvalidInput, NotReady
from service.middleware.body_memory import BODIES, Budget
from service.observability.metrics import Recorder
from service.settings import Settings
from service.shutdown import Shutdown, Stage

TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MILLISECONDS = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(slots=True)
class Service:
    """The state of this process."""

    settings: Settings
    metrics: Recorder
    engines: Engines | None = None  # set while they are open
    is_full: Callable[[], bool] = lambda: False  # whether a new connection would be refused
    # What has to end before the engines close, once the process drains.
    closing: Awaitable[None] | None = None
    shutdown: Shutdown = field(init=False)
    body_memory: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.shutdown = Shutdown(self.settings.drain_delay_s)
        self.body_memory = Budget(BODIES * self.settings.max_body_bytes)

    @property
    def draining(self) -> bool:
        return self.shutdown.stage >= Stage.DRAINING

    def open_engines(self) -> Engines:
        """Return the engines. Raises NotReady before they are open, Draining after they are closed."""
        if self.engines is None:
            if self.draining:
                raise Draining("the server is shutting down")
            raise NotReady("the bundles are still loading")
        return self.engines

    def check_ready(self) -> None:
        """Check whether new requests should be sent to this process. Raises NotReady or Draining if not."""
        if self.shutdown.stage >= Stage.LEAVING:
            raise Draining("the server will shut down")
        if problem := self.open_engines().load().problem:
            raise NotReady(problem)
        if self.is_full():
            raise NotReady("new connections are refused: max_connections are in use")

    def check_alive(self) -> None:
        """Check whether the engines can still compute. Raises NotReady if only a restart can help."""
        if self.engines is not None and not self.draining and not self.engines.alive():
            raise NotReady(self.engines.load().problem)


def timeout_s(headers: Mapping[str, str], settings: Settings) -> float:
    """Return a request's timeout in seconds: the client's, at most the server's. Raises InvalidInput."""
    header = headers.get(TIMEOUT_HEADER.lower())
    if header is None:
        return settings.deadline_ms / 1000
    if not MILLISECONDS.fullmatch(header):
        raise InvalidInput(
            f"{TIMEOUT_HEADER}: must be a whole number of milliseconds, at least 1",
            param=TIMEOUT_HEADER,
        )
    return min(int(header), settings.deadline_ms) / 1000
