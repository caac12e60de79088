"""Graceful shutdown: the server responds to every accepted request before it ends.

`service.shutdown` defines the order of stages. Here is what a server does to drain: it closes its listeners, accepts
the connections in their queues, completes the accepted requests, and ends after at most `drain_s` seconds.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import structlog
import uvicorn

from service.middleware.service_state import Service
from service.observability.logs import exit_at_once
from service.server.sockets import accept_all, stop_accepting
from service.settings_sources import CANNOT_GO_ON
from service.shutdown import Stage

log = structlog.get_logger()

GRACE_S = 0.4  # time for clients that have connected and are about to send a request


class GracefulServer(uvicorn.Server):
    """Uvicorn's server with a graceful shutdown; `listening`: the listeners that the event loop accepts from."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.listening: Sequence[socket.socket] = ()
        service.shutdown.entered = self.enter

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, since each process receives signals or commands in its own way."""
        yield

    def enter(self, stage: Stage) -> None:
        self.should_exit |= stage >= Stage.DRAINING
        self.force_exit |= stage >= Stage.HURRYING

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain without losing a client. Uvicorn alone would reset connections whose request has not been read yet."""
        log.info("draining", limit_s=self.service.settings.drain_s)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            stop_accepting(listener)
            await self.admit(accept_all(listener))
        await asyncio.sleep(GRACE_S / 2)
        for listener in sockets or []:
            # Connections whose handshake was in progress. Where the kernel has no filter, clients still connect: the
            # event loop must not run between the last `accept` and the close, which resets the queue's connections.
            last = [*accept_all(listener)]
            listener.close()
            await self.admit(last)
        await asyncio.sleep(GRACE_S / 2)
        await super().shutdown(sockets)

    async def admit(self, connections: Iterable[socket.socket]) -> None:
        """Serve accepted connections. One that fails does not stop the drain."""
        for connection in [*connections]:
            try:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(self.connection, connection)
            except OSError as error:
                log.warning("a connection cannot be accepted", problem=str(error))
                connection.close()

    def connection(self) -> asyncio.BaseProtocol:
        """Return one connection's protocol in the same way as uvicorn."""
        state, lifespan = self.server_state, self.lifespan.state
        make: Callable[..., asyncio.BaseProtocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=state, app_state=lifespan)

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and any(listener.fileno() < 0 for listener in self.listening):
            self.lose_listener()
        return await super().on_tick(counter)

    def lose_listener(self) -> None:
        """End the process at once, because the event loop has closed a listener.

        The event loop does so if the system refuses to continue.
        """
        log.error("the service cannot go on", problem="a listening socket was closed")
        exit_at_once(CANNOT_GO_ON)
