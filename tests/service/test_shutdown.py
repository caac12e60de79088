"""Signals lead from each stage to the next one, as the table of `service.shutdown` states."""

import asyncio
from signal import SIGINT, SIGQUIT, SIGTERM

import pytest

from service.shutdown import Shutdown, Stage

STARTING, RUNNING, LEAVING, DRAINING, HURRYING, STOPPED = Stage


@pytest.mark.parametrize(
    ("first", "delay_s", "signals", "stages"),
    [
        (STARTING, 60, [SIGTERM], [STOPPED]),
        (RUNNING, 60, [SIGTERM], [LEAVING]),
        (RUNNING, 60, [SIGQUIT, SIGTERM, SIGTERM], [LEAVING, DRAINING, HURRYING]),
        (RUNNING, 60, [SIGTERM, SIGINT, SIGINT], [LEAVING, DRAINING, STOPPED]),
        (RUNNING, 60, [SIGINT, SIGTERM], [DRAINING, HURRYING]),
        (RUNNING, 0, [SIGTERM, SIGTERM, SIGTERM], [DRAINING, HURRYING]),
        (RUNNING, 0, [SIGTERM, SIGTERM, SIGINT], [DRAINING, HURRYING, STOPPED]),
    ],
)
async def test_signals(first, delay_s, signals, stages):
    entered = []
    shutdown = Shutdown(delay_s, entered.append)
    shutdown.stage = first
    for number in signals:
        shutdown.receive_signal(number)
    assert stages == entered


async def test_a_delay_ends_with_a_drain():
    """An earlier stage is never entered again, also when the delay ends later."""
    drained = asyncio.Event()
    shutdown = Shutdown(0.001, lambda stage: drained.set() if stage == DRAINING else None)
    shutdown.advance(RUNNING)
    shutdown.receive_signal(SIGTERM)
    await asyncio.wait_for(drained.wait(), 30)
    shutdown.advance(LEAVING)
    assert DRAINING == shutdown.stage
