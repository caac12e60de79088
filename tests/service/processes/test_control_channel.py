"""Commands reach a child and its reports come back, whole and in order, until one of the two is gone."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from service import liveness
from service.processes.control_channel import (
    DRAIN,
    KEYS,
    MISSING,
    PEER,
    ChildControl,
    ControlChannel,
    Report,
    channel_to,
)
from tests.service.fakes import until


def linked() -> tuple[ChildControl, ControlChannel, list[Report]]:
    """Both ends, and the reports that the main process receives."""
    heard: list[Report] = []
    ours, theirs = socket.socketpair()
    return ChildControl(ours, heard.append), ControlChannel(theirs), heard


async def test_orders_end_with_the_main_process():
    """Commands arrive one by one, each with its socket, until the main process is gone."""
    link, given, _ = linked()
    one, other = socket.socketpair()
    link.send(channel_to(0), one)
    link.send(DRAIN)
    link.close()
    got = [order async for order in given]
    assert [channel_to(0), DRAIN] == [order.kind for order in got]
    assert got[0].end is not None
    got[0].end.send(b"hello")
    assert b"hello" == other.recv(5)
    for end in (one, other, got[0].end):
        end.close()


async def test_commands_end_without_reports():
    """A dead main process is detected even if its reports are unread."""
    link, given, heard = linked()
    link.send(DRAIN)
    await given.report({"unread": True})
    link.close()
    assert [DRAIN] == [order.kind async for order in given]
    assert [] == heard
    await given.report({"to": "nobody"})


async def test_orders_to_the_dead_are_dropped():
    """A command to a child that has just ended is dropped."""
    ours, theirs = socket.socketpair()
    link = ChildControl(ours, lambda report: None)
    theirs.close()
    assert not link.send(DRAIN)
    assert not link.send_keys(b"{}")
    await asyncio.sleep(0)
    link.close()


async def test_orders_to_the_deaf_are_dropped():
    """A child that does not read does not block the main process."""
    ours, theirs = socket.socketpair()
    link = ChildControl(ours, lambda report: None)
    assert link.send(DRAIN)
    assert not all(link.send(DRAIN) for _ in range(10_000))
    link.close()
    theirs.close()


async def test_keys_of_any_size_come_whole():
    """Keys that are larger than what a socket takes at once arrive with one order, between others."""
    link, given, _ = linked()
    text = b"k" * 5_000_000
    assert all((link.send(DRAIN), link.send_keys(text), link.send(DRAIN)))
    link.close()
    got = [order async for order in given]
    assert [(DRAIN, b""), (KEYS, text), (DRAIN, b"")] == [(order.kind, order.text) for order in got]


@contextmanager
def no_file_left() -> Iterator[None]:
    """This process has as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now[-2] + 1, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


async def test_a_descriptor_is_held_in_reserve():
    """A channel arrives also when the process has as many files open as it may."""
    link, given, _ = linked()
    one, other = socket.socketpair()
    link.send(channel_to(0), one)
    with no_file_left():
        order = await anext(given)
    assert order.end is not None
    for end in (one, other, order.end):
        end.close()
    link.close()
    assert [] == [order async for order in given]


async def test_a_lost_descriptor_is_reported(monkeypatch):
    """An order whose descriptor found no room is not passed on, and the main process can send it again."""
    monkeypatch.setattr(liveness, "DESCRIPTOR_MISSING_S", 0.001)
    link, given, heard = linked()
    one, other = socket.socketpair()
    with no_file_left():
        given._free_reserve()
        taken = os.open(os.devnull, os.O_RDONLY)
        link.send(channel_to(0), one)
        link.send(DRAIN)
        assert DRAIN == (await anext(given)).kind
        os.close(taken)
    await until(lambda: heard == [{MISSING: PEER}])
    link.send(channel_to(0), one)
    order = await anext(given)
    assert order.end is not None
    for end in (one, other, order.end):
        end.close()
    link.close()
    assert [] == [order async for order in given]


async def test_reports_come_whole_and_in_order(monkeypatch):
    """Heartbeats and reports are distinguished, also where many arrive at once."""
    monkeypatch.setattr(liveness, "HEARTBEAT_S", 0.001)
    link, given, heard = linked()
    beating = asyncio.create_task(given.beat())
    said = [{"number": number, "much": "\n" + "a" * 50_000} for number in range(40)]
    await asyncio.gather(*(given.report(one) for one in said))
    await until(lambda: sum(map(bool, heard)) == len(said) and heard[-1] == {})
    assert said == [report for report in heard if report]
    beating.cancel()
    link.close()
    assert [] == [order async for order in given]
