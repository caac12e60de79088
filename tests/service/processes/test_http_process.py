"""An HTTP process obeys the main process, which knows how it is."""

import asyncio
import socket

from service import liveness
from service.keys import Key, dump_keys
from service.processes.channel import frame
from service.processes.control_channel import PEER, ChildControl, ControlChannel
from service.processes.http_process import Worker, exit_on_failure
from service.processes.messages import Cancel
from service.settings import Settings
from tests.service.fakes import until


async def test_the_main_process_gets_the_first_report(lines):
    """Once the log states that a process serves, a hang of it is noticed."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    worker = Worker(Settings(http_workers=1), ControlChannel(theirs))
    ours.setblocking(False)
    said = asyncio.create_task(worker.report_serving([listener]))
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


async def test_a_process_that_cannot_receive_results_ends(monkeypatch):
    """It would never be ready again, and is started again."""
    ended = asyncio.Event()
    monkeypatch.setattr("os._exit", lambda status: ended.set())
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    ends = (*socket.socketpair(), *socket.socketpair())
    _, orders, theirs, ours = ends
    worker = Worker(Settings(http_workers=1), ControlChannel(orders))
    await worker.device.connect(ours)
    theirs.sendall(frame("notice", 0, Cancel(1)).replace(b"Cancel", b"Cancer"))
    await asyncio.wait_for(ended.wait(), 30)
    for end in ends:
        end.close()


async def test_a_worker_reports_that_it_has_no_channel(monkeypatch):
    """It reports this until a channel comes, because a command or the channel's other end may be lost."""
    monkeypatch.setattr(liveness, "CHANNEL_MISSING_S", 0.001)
    ours, theirs = socket.socketpair()
    end, other = socket.socketpair()
    reports = []
    link = ChildControl(ours, reports.append)
    worker = Worker(Settings(http_workers=1), ControlChannel(theirs))
    watching = asyncio.create_task(worker.watch_channel())
    await until(lambda: len(reports) > 1)
    assert {"missing": PEER} == reports[0] == reports[1]
    await worker.device.connect(end)
    await asyncio.sleep(0.05)
    reports.clear()
    await asyncio.sleep(0.05)
    assert [] == reports
    other.close()
    await until(lambda: len(reports) > 0)
    watching.cancel()
    link.close()
    theirs.close()


async def test_a_worker_takes_new_keys():
    """Keys that come with an order replace those that it started with."""
    ours, theirs = socket.socketpair()
    link = ChildControl(ours, lambda report: None)
    keys = {name: Key(sha256=digit * 64) for name, digit in (("a", "1"), ("b", "2"))}
    worker = Worker(Settings(http_workers=1, keys={"a": keys["a"]}), ControlChannel(theirs))
    obeying = asyncio.create_task(worker.follow_commands())
    link.send_keys(dump_keys({"b": keys["b"]}))
    assert worker.keys is not None
    await until(lambda: worker.keys.names == ["b"])
    link.close()
    await obeying


async def test_a_worker_that_no_longer_obeys_ends(monkeypatch, lines):
    """It could neither be connected nor drained, so it ends, and is started again."""
    statuses = []
    monkeypatch.setattr("os._exit", statuses.append)
    ours, theirs = socket.socketpair()
    link = ChildControl(ours, lambda report: None)
    worker = Worker(
        Settings(http_workers=1, keys={"a": Key(sha256="1" * 64)}), ControlChannel(theirs)
    )
    link.send_keys(b"{")
    following = asyncio.create_task(worker.follow_commands())
    await asyncio.wait([following])
    exit_on_failure(following)
    assert [1] == statuses
    assert "HTTP cannot go on" == lines[-1]["event"]
    link.close()
    theirs.close()
