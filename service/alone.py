"""HTTP and inference in one process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from service.app import create_app
from service.curator import Curator
from service.engines import Engines
from service.local import open_device
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings
from service.watch import watch


def serve_alone(settings: Settings, listeners: Sequence[socket.socket]) -> None:
    """Serve until SIGTERM."""
    metrics = Metrics(settings.keys)
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    Server(app, settings).run([*listeners])


@asynccontextmanager
async def open_local_engines(metrics: Metrics, settings: Settings) -> AsyncIterator[Engines]:
    """Engines on a device in this process, which tells the metrics of its batches.

    Raises BundleError or ProviderError when a bundle must not be served.
    """
    async with open_device(settings, metrics) as device:
        curator = Curator(device, settings, metrics)
        curator.open()
        engines = Engines(device, curator.execute, metrics.observe_comparison)
        try:
            await curator.follow(engines)
            watching = asyncio.create_task(watch(curator, settings))
            try:
                yield engines
            finally:
                watching.cancel()
        finally:
            engines.close()
