"""The HTTP server of one process: uvicorn's, which here loses nobody when it ends."""

import asyncio
import gc
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import structlog
import uvicorn
from fastapi import FastAPI

from service.middleware.body_memory import BODIES
from service.middleware.request_context import RequestLifecycle
from service.middleware.service_state import Service
from service.observability.logs import exit_at_once
from service.server.connection import Protocol
from service.server.excess_connections import Excess
from service.server.flow_control import BODY_PIECE, Hangups, Reader, piece_size
from service.server.sockets import accept_all, let_nobody_connect, url_of
from service.settings import Settings
from service.settings_sources import CANNOT_GO_ON

log = structlog.get_logger()

FEW = 256  # excess connections are kept open in any case, or a flood would cut them off before they are answered
GRACE_S = 0.4  # for those who have connected and are about to ask
GARBAGE = (
    10_000  # new objects, after which those in circles are looked for: requests make next to none
)
OTHER_FILES = 512  # that a process may have open in addition to twice its connections
OWN_FILES = 256  # of these, what no connection may take


class Server(uvicorn.Server):
    """Uvicorn's server: it says where it listens, and from the signal on that it is leaving, then draining."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=connections(settings, app.state.lifecycle),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than the 60 s after which load balancers let go
            timeout_graceful_shutdown=max(0, math.floor(settings.drain_s - GRACE_S)),
        )
        super().__init__(config)
        self.service: Service = app.state.service
        self.drains = math.inf  # when, by `time.monotonic`
        self.listening: Sequence[socket.socket] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the event loop accept from duplicates: when it has let go, the queues behind are ours.

        sockets: the listener and, if they have one of their own, that of the metrics
        """
        make_room(share_of_connections(self.service.settings))
        self.listening = [listener.dup() for listener in sockets or []]
        await super().startup(self.listening)
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked at again and again
        gc.set_threshold(GARBAGE)
        await self.say_it_serves(sockets or [])

    async def say_it_serves(self, sockets: Sequence[socket.socket]) -> None:
        if sockets:
            urls = dict(zip(("url", "metrics"), map(url_of, sockets), strict=False))
            log.info("serving", **urls, pid=os.getpid())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lose nobody: uvicorn alone resets who has connected and is not yet heard."""
        log.info("draining", seconds=self.service.settings.drain_s)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            let_nobody_connect(listener)
            await self.admit_all(listener)
        await asyncio.sleep(GRACE_S / 2)
        for listener in sockets or []:
            await self.admit_all(listener)  # those who had been half way
            listener.close()
        await asyncio.sleep(GRACE_S / 2)
        await super().shutdown(sockets)

    async def admit_all(self, listener: socket.socket) -> None:
        for connection in [*accept_all(listener)]:
            await asyncio.get_running_loop().connect_accepted_socket(self.connection, connection)

    def connection(self) -> asyncio.BaseProtocol:
        """One connection's protocol, as uvicorn makes it."""
        state, lifespan = self.server_state, self.lifespan.state
        make: Callable[..., asyncio.BaseProtocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=state, app_state=lifespan)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # No logging here: the signal may have interrupted a log line, which holds the log's lock.
        delay_s = self.service.settings.drain_delay_s
        if sig == signal.SIGTERM and delay_s and self.started and not self.service.leaving:
            self.service.leaving = True
            self.drains = time.monotonic() + delay_s
        else:
            self.drain()

    def drain(self) -> None:
        """Stop listening, answer what was accepted, and end; asked twice, end."""
        self.service.leaving = self.service.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and time.monotonic() >= self.drains:
            self.drain()
        if not self.should_exit and any(listener.fileno() < 0 for listener in self.listening):
            self.lose_listener()
        return await super().on_tick(counter)

    def lose_listener(self) -> None:
        """The event loop has closed a listener, as it does where the system refuses to go on: end at once."""
        log.error("the service cannot go on", problem="a listening socket was closed")
        exit_at_once(CANNOT_GO_ON)


def connections(settings: Settings, lifecycle: RequestLifecycle) -> type[asyncio.Protocol]:
    """What makes one process's connections, which share a limit."""
    served, excess = divide(share_of_connections(settings))
    admitted: set[Protocol] = set()
    extra = Excess(excess)
    hangups = Hangups()
    piece = piece_size(BODIES * settings.max_body_bytes, served)
    buffer = memoryview(bytearray(BODY_PIECE * piece))

    def make(**given: Any) -> Reader:
        protocol = Protocol(
            **given,
            admitted=admitted,
            excess=extra,
            max_connections=served,
            header_timeout_s=settings.header_timeout_s,
            lifecycle=lifecycle,
            hangups=hangups,
        )
        return Reader(protocol, buffer)

    return cast(type[asyncio.Protocol], make)


def share_of_connections(settings: Settings) -> int:
    """One process's part of the connections that the service keeps."""
    return math.ceil(settings.max_connections / (settings.http_workers or 1))


def divide(connections: int) -> tuple[int, int]:
    """Of the connections that files can be had for, how many are served, and how many more are kept open.

    Where the system allows fewer files than the connections need, fewer are served.
    """
    allowed = allowed_files(connections)
    available = max(allowed - OWN_FILES, allowed // 2, 2)
    served = min(connections, available // 2)
    return served, min(available - served, max(connections, FEW))


def allowed_files(connections: int) -> int:
    """Files that this process may have open once `make_room` has raised the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * connections + OTHER_FILES
    if soft >= need:
        return soft
    return need if hard == resource.RLIM_INFINITY else min(need, hard)


def make_room(connections: int) -> None:
    """Let this process have as many files open as its connections need, those to be refused included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need, allowed = 2 * connections + OTHER_FILES, allowed_files(connections)
    if allowed != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < need:
        log.warning(
            "the system allows fewer files than max_connections needs", has=allowed, need=need
        )
