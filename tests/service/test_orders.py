"""Orders go to a child and reports come back, whole and in order, until one of the two is gone."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from service import orders
from service.orders import DRAIN, PEER, Link, Orders, Report


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def linked() -> tuple[Link, Orders, list[Report]]:
    """Both ends, and what the main process hears."""
    heard: list[Report] = []
    ours, theirs = socket.socketpair()
    return Link(ours, heard.append), Orders(theirs), heard


async def test_orders_end_with_the_main_process() -> None:
    """Orders come one by one, each with its socket, until there is nobody to give any."""
    link, given, _ = linked()
    one, other = socket.socketpair()
    link.give(PEER, one)
    link.give(DRAIN)
    link.close()
    got: list[tuple[bytes, Any]] = [order async for order in given]
    assert [PEER, DRAIN] == [order for order, _ in got]
    got[0][1].send(b"hello")
    assert b"hello" == other.recv(5)
    for end in (one, other, got[0][1]):
        end.close()


async def test_orders_end_though_reports_were_not_heard() -> None:
    """A main process that is gone with reports unread is as gone as any."""
    link, given, heard = linked()
    link.give(DRAIN)
    await given.report({"unread": True})
    link.close()
    assert [DRAIN] == [order async for order, _ in given]
    assert [] == heard
    await given.report({"to": "nobody"})


async def test_orders_to_the_dead_are_dropped() -> None:
    """A child that has just gone cannot be told, and need not; it has said its last."""
    ours, theirs = socket.socketpair()
    link = Link(ours, lambda report: None)
    theirs.close()
    link.give(DRAIN)
    await asyncio.sleep(0)
    link.close()


async def test_orders_to_the_deaf_are_dropped() -> None:
    """A child that does not listen does not stop who gives the orders."""
    ours, theirs = socket.socketpair()
    link = Link(ours, lambda report: None)
    for _ in range(10_000):
        link.give(DRAIN)
    link.close()
    theirs.close()


async def test_reports_come_whole_and_in_order(monkeypatch: Any) -> None:
    """Signs of life and what is said between them are told apart, also where much is said at once."""
    monkeypatch.setattr(orders, "BEAT_S", 0.001)
    link, given, heard = linked()
    beating = asyncio.create_task(given.beat())
    said = [{"number": number, "much": "\n" + "a" * 50_000} for number in range(40)]
    await asyncio.gather(*(given.report(one) for one in said))
    await until(lambda: sum(map(bool, heard)) == len(said) and heard[-1] == {})
    assert said == [report for report in heard if report]
    beating.cancel()
    link.close()
    assert [] == [order async for order in given]
