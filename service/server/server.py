"""The HTTP server of one process: uvicorn's, with our connections, their limits, and a graceful shutdown."""

import asyncio
import gc
import math
import os
import socket
from collections.abc import Sequence
from typing import Any, cast

import structlog
import uvicorn
from fastapi import FastAPI

from service.middleware.body_memory import BODIES
from service.middleware.request_lifecycle import RequestLifecycle
from service.server.connection import Protocol
from service.server.connection_limits import (
    divide_connections,
    raise_file_limit,
    share_of_connections,
)
from service.server.excess_connections import ExcessConnections
from service.server.flow_control import BODY_PIECE, HangupWatcher, Reader, piece_size
from service.server.graceful_shutdown import GRACE_S, GracefulServer
from service.server.sockets import url_of
from service.settings import Settings

log = structlog.get_logger()

GARBAGE = 10_000  # new objects between collections: requests make next to no cycles


class Server(GracefulServer):
    """The server of one process, which logs where it listens."""

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
            timeout_keep_alive=cast(int, settings.keep_alive_s),  # uvicorn passes it to call_later
            timeout_graceful_shutdown=max(0, math.floor(settings.drain_s - GRACE_S)),
        )
        super().__init__(config, app.state.service)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the event loop accept from duplicates: when it has let go, the queues behind are ours.

        sockets: the listener and, if they have one of their own, that of the metrics
        """
        raise_file_limit(share_of_connections(self.service.settings))
        self.listening = [listener.dup() for listener in sockets or []]
        await super().startup(self.listening)
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked at again and again
        gc.set_threshold(GARBAGE)
        await self.report_serving(sockets or [])

    async def report_serving(self, sockets: Sequence[socket.socket]) -> None:
        if sockets:
            urls = dict(zip(("url", "metrics"), map(url_of, sockets), strict=False))
            log.info("serving", **urls, pid=os.getpid())


def connections(settings: Settings, lifecycle: RequestLifecycle) -> type[asyncio.Protocol]:
    """What makes one process's connections, which share a limit."""
    served, excess = divide_connections(share_of_connections(settings))
    admitted: set[Protocol] = set()
    extra = ExcessConnections(excess)
    hangups = HangupWatcher()
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
