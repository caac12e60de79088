"""The inference process: the device, and the HTTP processes that it computes for."""

import asyncio
import gc
from contextlib import AsyncExitStack

import structlog

from service.engines.local_device import open_device
from service.observability import logs
from service.observability.metrics import Metrics
from service.processes.control_channel import ControlChannel
from service.processes.frontends import Frontends
from service.rollout.directory_watcher import watch
from service.rollout.model_manager import ModelManager, Resume
from service.settings import Settings

log = structlog.get_logger()


class CannotStart(Exception):
    """Starting this process again would not help."""


async def compute(
    settings: Settings, control: ControlChannel, resume: Resume | None = None
) -> None:
    """Open the bundles; compute for every HTTP process that the orders bring; end when they and it have gone.

    resume: what a process before this one reported of its bundles, which are opened then, and no others.

    Raises CannotStart when the bundles cannot be opened. When only a restart can help, the process ends at once.
    """
    metrics = Metrics(settings.keys)
    async with AsyncExitStack() as stack:
        try:
            opening = open_device(settings, metrics)
            device = await stack.enter_async_context(opening)
            manager = ModelManager(device, settings, metrics, control.report)
            manager.open(resume)
        except Exception as error:
            raise CannotStart(error) from error
        frontends = Frontends(device, manager, metrics)
        await manager.follow(frontends)
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked at again and again
        serving = asyncio.create_task(serve(frontends, control))
        telling = asyncio.create_task(frontends.tell_load())
        beating = asyncio.create_task(control.beat())
        watching = asyncio.create_task(watch(manager, settings))
        await asyncio.wait([serving, telling], return_when=asyncio.FIRST_COMPLETED)
        telling.cancel()
        beating.cancel()
        watching.cancel()
        if not serving.done():
            log.error("inference cannot go on", problem=device.load().problem)
            logs.exit_at_once(1)  # any other way to end would wait for a thread that hangs
        serving.result()


async def serve(frontends: Frontends, control: ControlChannel) -> None:
    """Welcome whom the orders bring, until there are no more and all have left."""
    async for order in control:
        if order.end is not None:
            await frontends.add_http_process(order.end)
    await frontends.none()
