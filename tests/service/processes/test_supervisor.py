"""The main process ends the service where it cannot do without it going on, and repeats what got lost."""

import asyncio
import json
import socket
import sys
from typing import Any

import pytest
from pydantic import SecretStr

from service import liveness
from service.keys import Key, load_keys
from service.liveness import LastSign
from service.processes import supervisor
from service.processes.control_channel import (
    DRAIN,
    KEYS,
    PEER,
    ChildControl,
    ControlChannel,
    channel_to,
)
from service.processes.supervisor import Child, Processes
from service.settings import Settings


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "RESTART_PAUSES_S", (0.01,))


class FakeProcess:
    """A child's process, of which only its end is of interest."""

    pid = 1

    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def child(main: Processes, role: str) -> tuple[Child, ControlChannel]:
    """A child of this role, and its own end of the orders."""
    ours, theirs = socket.socketpair()
    process: Any = FakeProcess()
    control = ChildControl(ours, lambda report: main._receive_report(made, report))
    made = Child(role, process, control, LastSign(main._stall_clock), LastSign(main._stall_clock))
    main._children.add(made)
    return made, ControlChannel(theirs)


def close(*pairs: tuple[Child, ControlChannel]) -> None:
    for made, control in pairs:
        made.control.close()
        control._free_reserve()
        control._end.close()


def test_a_process_that_cannot_be_started_again_ends_the_service(monkeypatch, tmp_path, lines):
    """After a number of failed starts in a row the service ends, for its supervisor to see."""
    monkeypatch.setattr(liveness, "FAILED_STARTS", 2)
    main = Processes(Settings(bundles=(tmp_path / "nothing",)), [])
    main._served.add(("inference", 0))  # once, long ago
    assert 4 == asyncio.run(main.run())
    assert "the service cannot go on" in [line["event"] for line in lines]
    assert 2 == sum(line["event"] == "the inference process ended" for line in lines)


def test_a_system_without_room_for_a_process_is_tried_again(monkeypatch, lines):
    """What the system refuses now it may grant later; if it does not, the service ends."""
    monkeypatch.setattr(sys, "executable", "/nothing")
    assert 4 == asyncio.run(Processes(Settings(), []).run())
    problems = [line["problem"] for line in lines if line["event"].endswith("process ended")]
    assert liveness.FAILED_STARTS <= len(problems)
    assert all("No such file" in problem for problem in problems)


async def test_a_channel_that_got_lost_is_made_again(lines):
    """An HTTP process that reports none gets another; reports while there is no inference process are in vain."""
    main = Processes(Settings(), [])
    frontend = child(main, "http")
    main._receive_report(frontend[0], {"missing": PEER})
    assert frontend[0].serves is None  # such a report says nothing of that
    back = child(main, "inference")
    main._receive_report(frontend[0], {"missing": PEER})
    one, other = await anext(frontend[1]), await anext(back[1])
    assert (channel_to(0), channel_to(0)) == (one.kind, other.kind)
    assert one.end is not None
    assert other.end is not None
    one.end.send(b"hello")
    assert b"hello" == other.end.recv(5)
    one.end.close()
    other.end.close()
    close(frontend, back)


async def test_a_channel_that_cannot_be_made_ends_both(monkeypatch):
    """When it did not help for so long, both processes are started again."""
    monkeypatch.setattr(liveness, "CHANNEL_REPEATS", 3)
    main = Processes(Settings(), [])
    frontend, back = child(main, "http"), child(main, "inference")
    for _ in range(2):
        main._receive_report(frontend[0], {"missing": PEER})
    killed = [made.process for made, _ in (frontend, back)]
    assert [False, False] == [process.killed for process in killed]
    main._receive_report(frontend[0], {"missing": PEER})
    assert [True, True] == [process.killed for process in killed]
    close(frontend, back)


async def test_a_child_that_takes_no_order_is_ended():
    """Its queue is full, so it would miss what the others act on; the next one is connected anew."""
    main = Processes(Settings(), [])
    frontend = child(main, "http")
    while frontend[0].control.send(DRAIN):
        pass
    main._send(frontend[0], DRAIN)
    assert frontend[0].process.killed
    close(frontend)


def test_the_key_of_receipts_reaches_children():
    """As it is, not with stars in its place."""
    settings = Settings(receipt_key=SecretStr("a-key-of-sixteen-letters"))
    config = supervisor.startup_config(settings, None)
    assert settings == supervisor.read_startup_config(config).settings


async def test_new_keys_reach_children_of_now_and_later():
    """HTTP processes get them by an order, again if they report it missing, and the next ones at their start."""
    old, new = {"a": Key(sha256="1" * 64)}, {"b": Key(sha256="2" * 64)}
    main = Processes(Settings(keys=old), [])
    frontend = child(main, "http")
    main._change_keys(new)
    main._receive_report(frontend[0], {"missing": KEYS[0]})
    for _ in range(2):
        order = await anext(frontend[1])
        assert (KEYS, new) == (order.kind, load_keys(order.text))
    settings = supervisor.startup_config(main._settings, None).splitlines()[0]
    assert ["b"] == [*json.loads(settings)["keys"]]
    close(frontend)
