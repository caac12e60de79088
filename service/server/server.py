"""The HTTP server of one process: uvicorn's server with our connections, their limits, and a graceful shutdown."""

import asyncio
import gc
import math
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog
import uvicorn
from fastapi import FastAPI

from service.middleware.body_memory import BODIES
from service.middleware.request_lifecycle import RequestLifecycle
from service.server.connection import Connection, Shared
from service.server.connection_limits import PROBES, divide_connections, raise_file_limit
from service.server.connection_table import ConnectionTable
from service.server.flow_control import BODY_PIECE, piece_size
from service.server.graceful_shutdown import GRACE_S, GracefulServer
from service.server.sockets import limit_unsent, reuse_address, url_of
from service.settings import Settings
from service.shutdown import Stage

if TYPE_CHECKING:
    from service.api.dialects.grpc_server import GrpcServer

log = structlog.get_logger()

SWITCH_S = 0.001  # that the event loop waits for a text thread's Python code, after each of its system calls
GARBAGE = 10_000  # new objects between garbage collections; requests create almost no cycles


class Server(GracefulServer):
    """The server of one process. It logs the URLs of its listeners."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        table = connection_table(settings)
        app.state.service.is_full = table.is_full
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=connections(settings, app.state.lifecycle, table),
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
        self._app = app
        self._grpc: GrpcServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept. The event loop gets duplicates of the listeners, so that the server keeps the originals.

        After the event loop has closed its duplicates, the server itself accepts the connections in the queues.

        sockets: the listener and, if the metrics have their own port, the listener of the metrics
        """
        raise_file_limit(self.service.settings)
        for listener in sockets or []:
            limit_unsent(listener)
            reuse_address(listener, True)  # for the start of the next service
        self.listening = [listener.dup() for listener in sockets or []]
        await super().startup(self.listening)
        if self.started and self.service.settings.grpc_port is not None:
            await self.start_grpc()
        gc.collect()
        gc.freeze()  # excludes long-lived objects from garbage collection
        gc.set_threshold(GARBAGE)
        sys.setswitchinterval(SWITCH_S)
        await self.report_serving(sockets or [])

    async def start_grpc(self) -> None:
        """Start to accept calls over gRPC, whose packages are imported only here."""
        from service.api.dialects.grpc_server import GrpcServer
        from service.api.dialects.standard_grpc import SERVICES

        settings = self.service.settings
        served, _ = divide_connections(settings)
        self._grpc = GrpcServer(self._app, settings, served, SERVICES)
        await self._grpc.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._grpc is not None:
            seconds = max(0.0, self.service.settings.drain_s - GRACE_S)
            self.service.closing = asyncio.create_task(self._grpc.stop(seconds))
        await super().shutdown(sockets)

    def main_process(self) -> int:
        """Return the id of the process that a signal to the service goes to."""
        return os.getpid()

    async def report_serving(self, sockets: Sequence[socket.socket]) -> None:
        self.service.shutdown.advance(Stage.RUNNING)
        if sockets:
            urls = dict(zip(("url", "metrics"), map(url_of, sockets), strict=False))
            if self._grpc is not None:
                urls["grpc"] = self._grpc.url
            log.info("serving", **urls, pid=self.main_process())


def connection_table(settings: Settings) -> ConnectionTable:
    """Return an empty table for the connections of one process."""
    return ConnectionTable(*divide_connections(settings))


def connections(
    settings: Settings, lifecycle: RequestLifecycle, table: ConnectionTable
) -> type[asyncio.Protocol]:
    """Return a factory of one process's connections, which share the connection limits.

    Connections to the port of the metrics have places of their own, so that probes there do not depend on clients.
    """
    tables: defaultdict[int | None, ConnectionTable] = defaultdict(lambda: table)
    if settings.metrics_port is not None:
        tables[settings.metrics_port] = ConnectionTable(PROBES, PROBES)
    piece = piece_size(BODIES * settings.max_body_bytes, table.limit)
    buffer = memoryview(bytearray(BODY_PIECE * piece))
    shared = Shared(lifecycle, settings.header_timeout_s, tables, (buffer[:piece], buffer))
    return cast(type[asyncio.Protocol], partial(Connection, shared=shared))
