import asyncio
import json

import numpy as np
import pytest

from service.api.app import create_app
from service.core.encode import Window
from service.errors import Overloaded, ReplicaLost
from service.observability import live_view
from service.observability.metrics import Metrics
from service.scheduling.entries import Entry
from service.scheduling.executor import BatchStats
from service.scheduling.load import Backlog, Flow, Load, RemainingWork
from service.settings import Settings
from service.shutdown import Stage
from tests.service.processes.test_remote_device import pair, until

SECRETS = "the name of a tenant", "the id of a request"


def entry(length, heads=("sentiment",), priority=0):
    ids = np.full(length, 4711)
    tenant, request_id = SECRETS
    return Entry(
        "m@1", Window(ids, ids), request_id, 0.0, 1.0, priority, tenant=tenant, heads=heads
    )


def stats(*entries):
    lengths = [one.tokens for one in entries]
    queue_s = tuple(0.0 for _ in entries)
    return BatchStats("m@1", len(entries), sum(lengths), max(lengths), queue_s, 0.02, batch=entries)


BATCH = stats(entry(3), entry(5, ("entities",)), entry(2, priority=1))


class Viewer:
    """A client of the live view, and the frames that it got."""

    def __init__(self, metrics):
        self.frames = []
        self.watching = asyncio.create_task(metrics.watch_live(self.frames.append))

    async def next(self):
        """Return the next frame."""
        await until(lambda: self.frames)
        return json.loads(self.frames.pop(0))

    async def leave(self):
        self.watching.cancel()
        await asyncio.wait([self.watching])


async def test_a_frame_shows_what_rode_together():
    """It contains the lengths, heads and padding of a batch, the queue and refusals, but no tenant, id or token."""
    metrics = Metrics()
    waiting = {Flow("m@1", 1, SECRETS[0]): Backlog.of(RemainingWork(70, 2), RemainingWork(8, 1))}
    metrics.watch(lambda: {"cpu": Load(rates={"m@1": 100.0}, waiting=waiting)}, dict)
    viewer = Viewer(metrics)
    first = await viewer.next()
    assert (
        {},
        [],
        {"interactive": {"requests": 0, "tokens": 0}, "bulk": {"requests": 2, "tokens": 78}},
    ) == (first["ran"], first["batches"], first["queue"])

    metrics.observe_batch(BATCH)
    metrics.observe_batch(BATCH, padded=True)
    metrics.observe_error("overloaded")
    await until(lambda: viewer.frames)
    assert not [text for text in (*SECRETS, "4711") if text.encode() in viewer.frames[0]]
    second = await viewer.next()
    await viewer.leave()
    counted = {"batches": 2, "texts": 6, "tokens": 20, "slots": 30, "saved": 5}
    assert (counted, {"overloaded": 1}) == (second["ran"], second["refused"])
    shown, padded = second["batches"]
    assert {**shown, "padded": True} == padded
    assert ([3, 5, 2], {"sentiment": 2, "entities": 1}, 1) == (
        shown["lengths"],
        shown["heads"],
        shown["bulk"],
    )


async def test_latency_is_that_of_recent_answers(monkeypatch):
    """p50 and p99 are those of the answers of each class, once a second."""
    monkeypatch.setattr(live_view, "IDLE_S", 0.0)
    metrics = Metrics()
    viewer = Viewer(metrics)
    await viewer.next()
    for number in range(1, 102):
        metrics.observe_request("/embed", "m@1", 200, number / 1000)
    metrics.observe_request("/embed", "m@1", 429, 9.0)
    metrics.observe_request("/embed", "m@1", 200, 5.0, 1)
    viewer.frames.clear()
    frame = await viewer.next()
    await viewer.leave()
    assert {
        "interactive": {"number": 101, "p50": 0.051, "p99": 0.1},
        "bulk": {"number": 1, "p50": 5.0, "p99": 5.0},
    } == frame["latency"]


async def test_nothing_is_collected_while_nobody_watches():
    """Batches before the first viewer and after the last one are not kept, and no task runs."""
    metrics = Metrics()
    metrics.observe_batch(BATCH)
    one, two = Viewer(metrics), Viewer(metrics)
    assert {} == (await one.next())["ran"]
    await one.leave()
    metrics.observe_batch(BATCH)
    await two.next()
    assert 1 == (await two.next())["ran"]["batches"]
    await two.leave()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    metrics.observe_batch(BATCH)
    assert {} == (await Viewer(metrics).next())["ran"]


async def test_viewers_are_limited():
    """One more viewer than the limit is refused; the others go on."""
    metrics = Metrics()
    viewers = [Viewer(metrics) for _ in range(live_view.VIEWERS)]
    for viewer in viewers:
        await viewer.next()
    with pytest.raises(Overloaded, match="8 clients watch"):
        await metrics.watch_live(print)
    metrics.observe_batch(BATCH)
    assert all([(await viewer.next())["ran"] for viewer in viewers])


async def test_frames_come_from_the_inference_process():
    """A viewer of an HTTP process gets them; they end when it leaves, and fail when the process is lost."""
    async with pair() as both:
        viewer = Viewer(both.remote)
        await viewer.next()
        both.metrics.observe_batch(BATCH)
        assert 1 == (await viewer.next())["ran"]["batches"]
        await viewer.leave()
        await until(lambda: not both.metrics._live.watched)
        viewer = Viewer(both.remote)
        await viewer.next()
        await both.lose()
        with pytest.raises(ReplicaLost):
            await viewer.watching


@pytest.mark.parametrize("end", ["the client leaves", "the service drains", "the process is lost"])
async def test_the_stream_ends(engines, end):
    """A stream of events begins at once, and ends with its client, its service or its source of frames."""
    metrics = Metrics()
    app = create_app(Settings(), engines.open, metrics)
    sent, left, lost = [], asyncio.Event(), asyncio.Event()

    async def watch(send):
        send(b"{}")
        await lost.wait()
        raise ReplicaLost("the inference process was lost")

    if end == "the process is lost":
        metrics.watch_live = watch

    async def receive():
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/live/events",
        "query_string": b"",
        "headers": [],
    }
    serving = asyncio.create_task(app(scope, receive, send))
    await until(lambda: len(sent) > 1)
    headers = dict(sent[0]["headers"])
    assert b"text/event-stream" in headers[b"content-type"]
    assert b"data: {" == sent[1]["body"][:7]
    if end == "the client leaves":
        left.set()
    elif end == "the service drains":
        app.state.service.shutdown.advance(Stage.DRAINING)
    else:
        lost.set()
    await asyncio.wait_for(serving, 30)
    assert b"" == sent[-1]["body"]
    await until(lambda: not metrics._live.watched)
