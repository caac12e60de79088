"""An HTTP process, which sends its computations to the inference process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from service import liveness
from service.api.app import create_app
from service.engines.device import Device
from service.engines.registry import Engines
from service.keys import load_keys
from service.middleware.access_control import KeyCheck
from service.observability import logs
from service.processes.control_channel import KEYS, STAGES, ControlChannel, channel_to
from service.processes.device_group import DeviceGroup
from service.processes.remote_device import RemoteDevice
from service.processes.remote_metrics import RemoteMetrics
from service.server.server import Server
from service.settings import Settings
from service.shutdown import Stage

log = structlog.get_logger()


class Worker(Server):
    """A server whose inference process is connected by the main process, and replaced if it is lost."""

    def __init__(
        self, settings: Settings, control: ControlChannel, devices: Sequence[str] = ("cpu",)
    ) -> None:
        group = DeviceGroup(devices, exit_for_restart)
        self.devices = group.devices
        self.device = group.devices[0]  # its process has the models and the metrics
        self.control = control
        self.tasks: list[asyncio.Task[None]] = []
        metrics = RemoteMetrics(self.device)
        computing = group if len(devices) > 1 else self.device
        opening = partial(open_remote_engines, computing, self.devices, metrics)
        app = create_app(settings, opening, metrics)
        self.keys: KeyCheck | None = app.state.keys
        super().__init__(app, settings)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        for work in (self.follow_commands(), self.watch_channel()):
            self.tasks.append(asyncio.create_task(work))
            self.tasks[-1].add_done_callback(exit_on_failure)
        try:
            await super().serve(sockets)
        finally:
            for task in self.tasks:
                task.cancel()

    def main_process(self) -> int:
        return os.getppid()

    async def report_serving(self, sockets: Sequence[socket.socket]) -> None:
        """Report to the main process first. From then on, the main process detects a hang."""
        await self.control.report({})
        self.tasks.append(asyncio.create_task(self.control.beat()))
        await super().report_serving(sockets)

    async def follow_commands(self) -> None:
        async for command in self.control:
            if command.end is not None:
                await self.devices[command.device].connect(command.end)
            if command.kind == KEYS and self.keys is not None:
                self.keys.replace(load_keys(command.text))
            if command.kind in STAGES:
                self.service.shutdown.advance(STAGES[command.kind])
        self.service.shutdown.advance(Stage.DRAINING)  # the main process is gone

    async def watch_channel(self) -> None:
        """Report regularly while there is no channel. The main process knows whether there should be one."""
        while True:
            await asyncio.sleep(liveness.CHANNEL_MISSING_S)
            for number, device in enumerate(self.devices):
                if not device.connected:
                    await self.control.report_missing(channel_to(number))

    def lose_listener(self) -> None:
        exit_for_restart("a listening socket was closed")


def exit_on_failure(task: asyncio.Task[None]) -> None:
    """End the process if a task has failed that it depends on, so that the main process restarts it."""
    if not task.cancelled() and (error := task.exception()):
        log.error("unexpected error", exc_info=error)
        exit_for_restart("it no longer obeys the main process")


def exit_for_restart(
    problem: str = "a message of the inference process cannot be processed",
) -> None:
    """End the process for a restart. A drain would close the listener, which other processes share."""
    log.error("HTTP cannot go on", problem=problem)
    logs.exit_at_once(1)


@asynccontextmanager
async def open_remote_engines(
    computing: Device, devices: Sequence[RemoteDevice], metrics: RemoteMetrics, settings: Settings
) -> AsyncIterator[Engines]:
    """Yield engines on the inference processes, once the first has opened its bundles. Raises ValueError."""
    first = devices[0]
    compared, found = metrics.observe_comparison, metrics.observe_found
    engines = Engines(computing, first.execute, compared, settings, found)
    watching = [asyncio.create_task(device.watch()) for device in devices]
    try:
        await first.follow(engines)
        yield engines
    finally:
        for task in watching:
            task.cancel()
        engines.close()
