"""An HTTP process that computes nothing."""

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import structlog

from service import logs
from service.app import create_app
from service.orders import DRAIN, LEAVE, Orders
from service.remote import RemoteDevice, RemoteMetrics, open_remote_engines
from service.server import Server
from service.settings import Settings

log = structlog.get_logger()


class Worker(Server):
    """A server to which the main process brings an inference process, and another when that is lost."""

    def __init__(self, settings: Settings, orders: Orders) -> None:
        self.device = RemoteDevice(give_up)
        self.orders = orders
        self.tasks: list[asyncio.Task[None]] = []
        metrics = RemoteMetrics(self.device)
        super().__init__(
            create_app(settings, partial(open_remote_engines, self.device, metrics), metrics),
            settings,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.tasks.append(asyncio.create_task(self.obey()))
        try:
            await super().serve(sockets)
        finally:
            for task in self.tasks:
                task.cancel()

    async def say_it_serves(self, sockets: Sequence[socket.socket]) -> None:
        """The main process hears it first: from then on it sees when we hang."""
        await self.orders.report({})
        self.tasks.append(asyncio.create_task(self.orders.beat()))
        await super().say_it_serves(sockets)

    async def obey(self) -> None:
        async for order, end in self.orders:
            if end is not None:
                await self.device.connect(end)
            if order == LEAVE:
                self.service.leaving = True
            if order == DRAIN:
                self.drain()
        self.drain()  # the main process is gone


def give_up() -> None:
    """End, to be started again: draining would deafen the listener, which other processes have, too."""
    log.error("HTTP cannot go on", problem="what the inference process said could not be received")
    logs.close()
    os._exit(1)
