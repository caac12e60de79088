"""HTTP and inference in one process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog
from fastapi import FastAPI

from service import liveness
from service.api.app import create_app
from service.core.bundle_cache import fetch_bundle
from service.engines.local_device import open_device
from service.engines.registry import Engines
from service.errors import NotReady
from service.middleware.access_control import KeyCheck
from service.observability.logs import exit_at_once
from service.observability.metrics import Metrics
from service.processes.key_file_watcher import KeyFiles
from service.processes.process_signals import reap_orphans, stop_signals
from service.processes.trial import try_bundle
from service.rollout.directory_watcher import watch
from service.rollout.model_manager import ModelManager
from service.rollout.on_demand import Trial
from service.server.server import Server
from service.settings import Settings
from service.settings_sources import CANNOT_GO_ON, KeySource

log = structlog.get_logger()


def serve_in_one_process(
    settings: Settings, listeners: Sequence[socket.socket], source: KeySource | None = None
) -> None:
    """Serve until SIGTERM; source: where API keys are reloaded from."""
    metrics = Metrics()
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    SingleServer(app, settings, source).run([*listeners])
    log.info("stopped")


class SingleServer(Server):
    """The server of the only process, which itself reloads API keys."""

    def __init__(self, app: FastAPI, settings: Settings, source: KeySource | None) -> None:
        super().__init__(app, settings)
        keys: KeyCheck | None = app.state.keys
        self._files: KeyFiles | None = None
        if source is not None and keys is not None:
            self._files = KeyFiles(source, settings.keys, keys.replace)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        watching = [asyncio.create_task(self.watch_device()), asyncio.create_task(reap_orphans())]
        if self._files is not None:
            watching.append(asyncio.create_task(self._files.watch()))
        try:
            await super().serve(sockets)
        finally:
            for task in watching:
                task.cancel()

    async def report_serving(self, sockets: Sequence[socket.socket]) -> None:
        await super().report_serving(sockets)
        stop_signals.deliver(partial(self.receive_signal, asyncio.get_running_loop()))

    def receive_signal(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Handle a stop signal in the thread that receives it, since the event loop may be busy."""
        if self.service.shutdown.stops_at(number):
            log.info("stopped")
            exit_at_once(0)
        with suppress(RuntimeError):  # the loop is closed: the process ends anyway
            loop.call_soon_threadsafe(self.service.shutdown.receive_signal, number)

    async def watch_device(self) -> None:
        """End the process when only a restart can help, because a thread that hangs can be ended in no other way."""
        while True:
            await asyncio.sleep(liveness.DEVICE_POLL_S)
            try:
                self.service.check_alive()
            except NotReady as error:
                log.error("the service cannot go on", problem=error.message)
                exit_at_once(CANNOT_GO_ON)


@asynccontextmanager
async def open_local_engines(
    metrics: Metrics, settings: Settings, trial: Trial = try_bundle
) -> AsyncIterator[Engines]:
    """Yield engines on a device in this process. Raises BundleError or ProviderError for a bad bundle.

    trial: see `ModelManager`
    """
    own = [await asyncio.to_thread(fetch_bundle, path) for path in settings.bundles]
    settings = settings.model_copy(update={"bundles": tuple(own)})
    async with open_device(settings, metrics) as device:
        manager = ModelManager(device, settings, metrics, trial=trial)
        await asyncio.to_thread(manager.open)
        compared, found = metrics.observe_comparison, metrics.observe_found
        engines = Engines(manager.device, manager.execute, compared, settings, found)
        try:
            await manager.follow(engines)
            watching = asyncio.create_task(watch(manager, settings))
            try:
                yield engines
            finally:
                watching.cancel()
        finally:
            engines.close()
