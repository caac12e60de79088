"""An HTTP process obeys the main process, which knows how it is."""

import asyncio
import socket

import pytest
from structlog.typing import EventDict

from service.channel import Cancel, frame
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


async def test_who_cannot_receive_what_is_computed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never be ready again, and is started again."""
    ended = asyncio.Event()
    monkeypatch.setattr("os._exit", lambda status: ended.set())
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ends = (*socket.socketpair(), *socket.socketpair())
    _, orders, theirs, ours = ends
    worker = Worker(Settings(http_workers=1), Orders(orders))
    await worker.device.connect(ours)
    theirs.sendall(frame(Cancel(1)).replace(b"Cancel", b"Cancer"))
    await asyncio.wait_for(ended.wait(), 30)
    for end in ends:
        end.close()
