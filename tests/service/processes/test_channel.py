"""Messages arrive as they were sent, in order, however the socket cuts them."""

import asyncio
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.processes.channel import Channel, frame
from service.processes.messages import Cancel, Computed, LoadReport, Observed, Submit

SUBMIT = Submit(
    bundle="tiny@1",
    heads=["embeddings"],
    hidden=[],
    lengths=[2, 1],
    request_id="r",
    arrival=0.1,
    deadline=30.25,
    priority=1,
    tenant="t",
    each=True,
    unbatched=False,
)
MESSAGES: list[tuple[Any, ...]] = [
    ("request", 7, SUBMIT, np.arange(6).tobytes()),
    ("notice", 0, Cancel(7), b""),
    (
        "part",
        7,
        Computed([1], [[[2]]], [(0.1, 0.2, 8, 312, 1.5)], [(0, "inference_failed", "no number")]),
        np.ones(2, np.float32).tobytes(),
    ),
    ("notice", 0, LoadReport(41, {"m@1": 3.5}, [(("m@1", 1, "t"), [(6, 2, 80)])], "why", 1000), b""),
]  # fmt: skip


@given(st.lists(st.integers(1, 200), max_size=20))
def test_any_cut_gives_the_same_messages(cuts):
    """Half a header, two messages at once: a channel gives each whole."""
    got = []
    channel = Channel(lambda *received: got.append(received), lambda: None)
    stream = b"".join(frame(*sent) for sent in MESSAGES)
    start = 0
    for cut in [*cuts, len(stream)]:
        channel.data_received(stream[start : start + cut])
        start += cut
    for sent, received in zip(MESSAGES, got, strict=True):
        assert frame(*sent) == frame(*received)  # equal but for tuples, which arrive as lists


async def opened(end: socket.socket, **called: Any) -> Channel:
    channel = Channel(called.get("received", print), called.get("lost", lambda: None))
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=end)
    return channel


async def test_the_end_of_one_process_is_sent_to_the_other():
    """`lost` is called once, and what is sent afterwards goes nowhere."""
    one, other = socket.socketpair()
    lost = asyncio.Event()
    first, second = await opened(one, lost=lost.set), await opened(other)
    second.close()
    await asyncio.wait_for(lost.wait(), 30)
    first.send("notice", 0, Cancel(1))


async def test_much_goes_through_at_once():
    """What the socket's buffer cannot hold waits, and is lost neither in part nor in order."""
    one, other = socket.socketpair()
    got = []
    done = asyncio.Event()

    def received(*frame):
        got.append(frame)
        if len(got) == 20:
            done.set()

    first, second = await opened(one), await opened(other, received=received)
    for number in range(20):
        first.send("request", number, Cancel(number), np.full(50_000, number, np.int64))
    await asyncio.wait_for(done.wait(), 30)
    assert [Cancel(number) for number in range(20)] == [message for _, _, message, _ in got]
    assert all((np.frombuffer(arrays, np.int64) == n).all() for _, n, _, arrays in got)
    first.close()
    second.close()


class Wire(asyncio.Transport):
    """Knows what was written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def writelines(self, data: Any) -> None:
        self.written.append(b"".join(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


async def test_what_one_turn_says_is_one_write():
    """Messages are sent in order, at the end of the turn; a close sends them, too."""
    channel, wire = Channel(print, lambda: None), Wire()
    channel.connection_made(wire)
    for number in range(3):
        channel.send("notice", 0, Cancel(number))
    assert not wire.written
    await asyncio.sleep(0)
    channel.send("notice", 0, Cancel(3))
    channel.close()
    channel.send("notice", 0, Cancel(4))
    await asyncio.sleep(0)
    assert wire.written == [
        b"".join(frame("notice", 0, Cancel(number)) for number in range(3)),
        frame("notice", 0, Cancel(3)),
    ]


async def test_what_is_written_leaves_at_once():
    """Not after what else there is to do in this turn of the event loop: the other end can begin meanwhile."""
    one, other = socket.socketpair()
    other.setblocking(False)
    channel = await opened(one)
    channel.send("notice", 0, Cancel(1))
    await asyncio.sleep(0)
    assert frame("notice", 0, Cancel(1)) == other.recv(1000)
    channel.close()
    other.close()


async def test_the_receiving_end_is_at_fault():
    """Each end gets an error for the lost connection, with the end at fault."""

    def fail(*_):
        raise ValueError("our bug")

    one, other = socket.socketpair()
    losses = [asyncio.Event(), asyncio.Event()]
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    first = await opened(one, lost=losses[0].set)
    second = await opened(other, lost=losses[1].set, received=fail)
    first.send("notice", 0, Cancel(1))
    for lost in losses:
        await asyncio.wait_for(lost.wait(), 30)
    assert (False, True) == (first.broken, second.broken)
    assert ["our bug"] == [str(context["exception"]) for context in told]


def test_a_message_of_no_kind_is_our_bug():
    """Both ends are one version: what is unknown is not passed over."""
    channel = Channel(lambda *_: None, lambda: None)
    data = frame("notice", 0, Observed([]))
    with pytest.raises(KeyError):
        channel.data_received(data.replace(b"Observed", b"Obverted"))
