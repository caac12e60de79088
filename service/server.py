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

from service.calls import Service
from service.exchange import Reception
from service.flow_control import BODY_PIECE, Hangups, Reader, piece_size
from service.listeners import accept_all, let_nobody_connect, url_of
from service.protocol import Protocol
from service.room import BODIES
from service.settings import Settings

log = structlog.get_logger()

GRACE_S = 0.4  # for those who have connected and are about to ask
GARBAGE = (
    10_000  # new objects, after which those in circles are looked for: requests make next to none
)
OTHER_FILES = 256  # that a process has open beside its connections, and to spare


class Server(uvicorn.Server):
    """Uvicorn's server: it says where it listens, and from the signal on that it is leaving, then draining."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=connections(settings, app.state.reception),
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the event loop accept from duplicates: when it has let go, the queues behind are ours.

        sockets: the listener and, if they have one of their own, that of the metrics
        """
        make_room(share_of_connections(self.service.settings))
        await super().startup([listener.dup() for listener in sockets or []])
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
        return await super().on_tick(counter)


def connections(settings: Settings, reception: Reception) -> type[asyncio.Protocol]:
    """What makes one process's connections, which share a limit."""
    share = share_of_connections(settings)
    admitted: set[Protocol] = set()
    hangups = Hangups()
    piece = piece_size(BODIES * settings.max_body_bytes, share)
    buffer = memoryview(bytearray(BODY_PIECE * piece))

    def make(**given: Any) -> Reader:
        protocol = Protocol(
            **given,
            admitted=admitted,
            max_connections=share,
            header_timeout_s=settings.header_timeout_s,
            reception=reception,
            hangups=hangups,
        )
        return Reader(protocol, buffer)

    return cast(type[asyncio.Protocol], make)


def share_of_connections(settings: Settings) -> int:
    """One process's part of the connections that the service keeps."""
    return math.ceil(settings.max_connections / max(settings.http_workers, 1))


def make_room(connections: int) -> None:
    """Let this process have as many files open as its connections need, those to be refused included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * connections + OTHER_FILES
    if soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < need:
        log.warning("the system allows fewer files than max_connections needs", has=soft, need=need)
