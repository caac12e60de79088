"""An HTTP process obeys the main process, which knows how it is."""

import asyncio
import socket

from structlog.typing import EventDict

from service.orders import Orders
from service.settings import Settings
from service.worker import Worker


async def test_the_main_process_hears_before_anybody_that_it_serves(lines: list[EventDict]) -> None:
    """Whoever reads in the log that it serves may rely on being noticed when it hangs."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    worker = Worker(Settings(http_workers=1), Orders(theirs))
    ours.setblocking(False)
    said = asyncio.create_task(worker.say_it_serves([listener]))
    while not lines:
        assert not said.done()
        await asyncio.sleep(0)
    assert b"\n" == ours.recv(1)
    assert ["serving"] == [line["event"] for line in lines]
    await said
    for task in worker.tasks:
        task.cancel()
    for end in (ours, theirs, listener):
        end.close()
