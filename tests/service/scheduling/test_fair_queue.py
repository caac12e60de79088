"""The front of a queue is what sorting the whole queue would put first."""

import asyncio
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.encode import Encoding, Window
from service.scheduling.cost_model import Cost, Estimator
from service.scheduling.entries import Entry
from service.scheduling.fair_queue import (
    POOL_MOST,
    TYPICAL_LENGTH,
    FairQueue,
    FlowQueue,
    ModelStatistics,
    QueuedRequest,
)
from service.scheduling.load import Flow

FLOW = Flow("m@1")

ONE = Encoding(
    np.zeros(1, np.int64),
    np.zeros(1, np.int64),
    np.zeros((1, 2), np.int32),
    np.zeros(1, np.int32),
    np.zeros(1, np.int8),
)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def entry(start: float = 0.0, deadline: float = 1.0) -> Entry:
    made = Entry("m@1", ONE, "r", arrival=0.0, deadline=deadline)
    made.virtual_start = start
    return made


def entries(starts: list[float]) -> list[Entry]:
    return [entry(start) for start in starts]


def up_to(most: int) -> st.SearchStrategy[bytes]:
    """Bytes, as often many as few; a list would seldom have more than a dozen."""
    return st.integers(0, most).flatmap(lambda size: st.binary(min_size=size, max_size=size))


starts = up_to(2 * POOL_MOST).map(lambda some: [float(byte % 50) for byte in some])
leaving = up_to(600).map(lambda some: [at for at, byte in enumerate(some) if byte % 2])


@settings(max_examples=50)
@given(st.lists(st.tuples(starts, leaving, st.integers(1, POOL_MOST)), max_size=5))
def test_the_pool_is_the_front_of_a_stable_sort(rounds):
    """Whatever came, was taken or was dropped in between, and equal starts stay in order."""
    queue = ModelStatistics({1: Estimator()})
    lane = FlowQueue(FLOW, queue)
    waiting = []
    for arriving, gone, size in rounds:
        arrived = entries(arriving)
        queue.tokens += len(arrived)
        queue.size += len(arrived)
        for new in arrived:
            lane.push(new)
        waiting += arrived
        for left in [waiting[at] for at in gone if at < len(waiting)]:
            lane.remove(left)
        waiting = [left for left in waiting if left.queued]
        assert lane.front(size) == sorted(waiting, key=lambda left: left.virtual_start)[:size]
        assert queue.tokens == queue.size == len(waiting)


def test_an_empty_queue_expects_typical_texts():
    """Before anything came, its mean length is a guess."""
    queue = ModelStatistics({1: Estimator()})
    assert queue.mean_length == TYPICAL_LENGTH
    queue.tokens, queue.size = 6, 2
    assert queue.mean_length == 3


def test_late_requests_are_found_once_their_deadline_is_here(loop):
    """Earlier checks cost and change nothing; a request is late as soon as its first entry is."""
    line = FairQueue()
    line.models["m@1"] = ModelStatistics({1: Estimator()})
    requests = [
        QueuedRequest(
            [entry(deadline=9.0), entry(deadline=at)],
            loop.create_future(),
            flow_queue=line.flow_queue(FLOW),
        )
        for at in (3.0, 2.0, 4.0)
    ]
    for request in requests:
        line.enter(request)
    assert line.late(1.0) == []
    assert line.late(3.0) == requests[:2]
    for request in requests[:2]:
        request.flow_queue.leave(request)
    assert line.late(3.5) == []
    assert line.late(4.0) == requests[2:]


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "cancelled"])
def test_a_disconnected_client_is_forgotten(loop, taken):
    """A lane in which nothing waits holds on to no text, whether it was looked at or not."""
    lane = FlowQueue(FLOW, ModelStatistics({1: Estimator()}))
    for looked_at in (True, False):
        ids = np.zeros(3, np.int64)
        kept = weakref.ref(ids)
        own = [Entry("m@1", Window(ids, ids), "r", arrival=0.0, deadline=1.0)]
        request = QueuedRequest(own, loop.create_future(), flow_queue=lane)
        lane.admit(request)
        lane.enter(request)
        if looked_at:
            lane.pool()
        if taken:
            lane.take(request, own)
        else:
            lane.leave(request)
        request.release()
        del ids, own, request
        assert kept() is None


def test_as_many_are_looked_at_as_eight_batches_hold():
    """Few where batches are small, so that no entry is skipped for long; many where they are large."""
    queue = ModelStatistics({1: Estimator()})
    assert queue.pool_size == 32
    for _ in range(100):
        queue.count_batch(10)
    assert queue.pool_size == 80
    for _ in range(100):
        queue.count_batch(64)
    assert queue.pool_size == 256


def test_the_price_of_a_token_is_that_of_what_may_share_a_batch():
    """An entry that cannot share a batch pays for whole runs."""
    cost = Cost(per_run=1.0, per_token=0.01, per_slot=0.0)
    prices = []
    for alone in (False, True):
        queue = ModelStatistics({1: Estimator()}, alone)
        queue.estimators[1].cost = cost
        queue.tokens, queue.size = 20, 2
        prices.append(queue.price)
    assert prices == pytest.approx([1.8 / 80, 1.1 / 10])
