"""The inference process of a device, and the HTTP processes that it computes for."""

import asyncio
import gc
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from service.core import bundle
from service.core.device_places import Place
from service.engines.local_device import LocalDevice, open_device
from service.engines.memory_need import MemoryLimitError
from service.observability import logs
from service.observability.metrics import Metrics
from service.processes.control_channel import ControlChannel
from service.processes.followers import Followers, ForwardedMetrics, LeaderPeers
from service.processes.http_peers import HttpPeers
from service.processes.trial import try_bundle
from service.rollout.directory_watcher import watch
from service.rollout.model_manager import ModelManager, Resume
from service.rollout.on_demand import OPENING_ERRORS
from service.scheduling.load import EARLY_SHARE
from service.settings import Settings

log = structlog.get_logger()

START_ERRORS: tuple[type[Exception], ...] = (*OPENING_ERRORS, MemoryLimitError)


class CannotStart(Exception):
    """A startup failure that a restart of this process cannot fix."""


async def lead(
    settings: Settings,
    control: ControlChannel,
    resume: Resume | None = None,
    devices: Sequence[Place] = (Place("cpu"),),
) -> None:
    """Open the bundles, or those of `resume`, and compute for HTTP processes until all channels close.

    The process of the first device also decides which bundles those of the other devices open.

    Raises CannotStart if the bundles cannot be opened. If only a restart can help, the process ends at once.
    """
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        try:
            device = await stack.enter_async_context(open_device(settings, metrics))
            followers = Followers(device, [place.name for place in devices], metrics)
            manager = ModelManager(
                device, settings, metrics, control.report, try_bundle, followers.hold
            )
            manager.open(resume)
        except START_ERRORS as error:
            raise CannotStart(error) from error
        metrics.watch(followers.loads, manager.facts, EARLY_SHARE * settings.deadline_ms / 1000)
        peers = HttpPeers(manager.device, manager.execute, metrics, manager.device.strike)
        await manager.follow(peers)
        await followers.hold(manager.models)
        works = (watch(manager, settings), manager.reopen(), manager.watch_use())
        tasks = [asyncio.create_task(work) for work in works]
        await serve(device, peers, control, followers)
        for task in tasks:
            task.cancel()
        followers.close()


async def follow(settings: Settings, control: ControlChannel, resume: Resume | None) -> None:
    """Compute for HTTP processes on a device whose bundles the process of the first device chooses.

    Raises CannotStart if the bundles of a start cannot be opened. If only a restart can help, the process ends at once.
    """
    metrics = ForwardedMetrics()
    async with AsyncExitStack() as stack:
        try:
            device = await stack.enter_async_context(open_device(settings, metrics))
            loaded = map(bundle.load, settings.bundles if resume is None else ())
            for one in sorted(loaded, key=lambda own: own.manifest.encoder is not None):
                device.add(device.open(one))
        except START_ERRORS as error:
            raise CannotStart(error) from error
        await serve(device, LeaderPeers(device, metrics), control)


async def serve(
    device: LocalDevice,
    peers: HttpPeers,
    control: ControlChannel,
    followers: Followers | None = None,
) -> None:
    """Compute until the main process closes the control channel and all HTTP processes are disconnected."""
    gc.collect()
    gc.freeze()  # excludes long-lived objects from garbage collection
    serving = asyncio.create_task(connect(peers, control, followers))
    reporting = asyncio.create_task(peers.report_load())
    beating = asyncio.create_task(control.beat())
    await asyncio.wait([serving, reporting], return_when=asyncio.FIRST_COMPLETED)
    reporting.cancel()
    beating.cancel()
    if not serving.done():
        log.error("inference cannot go on", problem=device.load().problem)
        logs.exit_at_once(1)  # any other way to end would wait for a thread that hangs
    serving.result()


async def connect(
    peers: HttpPeers, control: ControlChannel, followers: Followers | None = None
) -> None:
    """Connect each process that a command brings. Return when the control channel and all their channels close."""
    async for command in control:
        if command.end is None:
            continue
        if command.device and followers:
            await followers.connect(command.device, command.end)
        else:
            await peers.add(command.end)
    await peers.all_disconnected()
