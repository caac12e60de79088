"""The inference process: the device, and the HTTP processes that it computes for."""

import asyncio
import gc
from contextlib import AsyncExitStack

import structlog

from service.engines.local_device import open_device
from service.engines.memory_need import MemoryLimitError
from service.observability import logs
from service.observability.metrics import Metrics
from service.processes.control_channel import ControlChannel
from service.processes.http_peers import HttpPeers
from service.processes.trial import try_bundle
from service.rollout.directory_watcher import watch
from service.rollout.model_manager import OPENING_ERRORS, ModelManager, Resume
from service.settings import Settings

log = structlog.get_logger()

START_ERRORS: tuple[type[Exception], ...] = (*OPENING_ERRORS, MemoryLimitError)


class CannotStart(Exception):
    """A startup failure that a restart of this process cannot fix."""


async def compute(
    settings: Settings, control: ControlChannel, resume: Resume | None = None
) -> None:
    """Open the bundles, or those of `resume`, and compute for HTTP processes until all channels close.

    Raises CannotStart if the bundles cannot be opened. If only a restart can help, the process ends at once.
    """
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        try:
            opening = open_device(settings, metrics)
            device = await stack.enter_async_context(opening)
            manager = ModelManager(device, settings, metrics, control.report, try_bundle)
            manager.open(resume)
        except START_ERRORS as error:
            raise CannotStart(error) from error
        peers = HttpPeers(device, manager, metrics)
        await manager.follow(peers)
        gc.collect()
        gc.freeze()  # excludes long-lived objects from garbage collection
        serving = asyncio.create_task(serve(peers, control))
        reporting = asyncio.create_task(peers.report_load())
        beating = asyncio.create_task(control.beat())
        watching = asyncio.create_task(watch(manager, settings))
        await asyncio.wait([serving, reporting], return_when=asyncio.FIRST_COMPLETED)
        reporting.cancel()
        beating.cancel()
        watching.cancel()
        if not serving.done():
            log.error("inference cannot go on", problem=device.load().problem)
            logs.exit_at_once(1)  # any other way to end would wait for a thread that hangs
        serving.result()


async def serve(peers: HttpPeers, control: ControlChannel) -> None:
    """Connect each HTTP process that a command brings. Return when the control channel and all their channels close."""
    async for command in control:
        if command.end is not None:
            await peers.add(command.end)
    await peers.all_disconnected()
