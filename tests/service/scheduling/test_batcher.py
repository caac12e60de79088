"""Requests become batches in a fair order; each gets its own answer or its own error."""

import asyncio
import gc
import itertools
import math
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service import errors
from service.core.encode import Encoding, Window
from service.core.packing import divide, join
from service.scheduling.batcher import Batcher
from service.scheduling.cost_model import Cost, Estimator, Sample
from service.scheduling.entries import Entry, EntryOutcome, Heads, Outcome
from service.scheduling.fair_queue import (
    FIRST_TRIAL,
    MAX_SKIPPED,
    POOL_MOST,
    TRIAL_EVERY,
    FlowQueue,
    ModelStatistics,
    QueuedRequest,
)
from service.scheduling.planner import Budget, area, plan
from tests.service.fakes import Clock

Answers = list[dict[str, NDArray[np.float32]]]


SOONER = Cost(per_run=0.1, per_token=0.001, per_slot=0.0)  # on many slots
FIXED = Cost(per_run=1.0, per_token=0.01, per_slot=0.0)  # batching pays
LINEAR = Cost(per_run=0.0, per_token=0.01, per_slot=0.0)  # batching gains nothing
PADDED = Cost(per_run=1.0, per_token=0.01, per_slot=1e-5)  # padding is dear
RECTANGLE = Cost(per_run=1.0, per_token=0.01, per_slot=0.0, padded=True)  # and all of it computed
ROOMY = Budget(tokens=1_000_000, size=1_000)

numbers = itertools.count(1)


def encoding(tokens: int, number: int) -> Encoding:
    """An encoding that carries its own number as its first id, and is answered with it."""
    ids = np.zeros(tokens, np.int64)
    ids[0] = number
    return Encoding(
        ids,
        np.zeros(tokens, np.int64),
        np.zeros((tokens, 2), np.int32),
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.int8),
    )


def text(
    tokens: int = 10,
    *,
    bundle: str = "m@1",
    number: int | None = None,
    arrival: float = 0.0,
    deadline: float = math.inf,
    heads: Heads = (),
    start: float = 0.0,
    tenant: str = "",
    priority: int = 0,
    unbatched: bool = False,
) -> Entry:
    number = next(numbers) if number is None else number
    window = encoding(tokens, number)
    entry = Entry(
        bundle, window, "r", arrival, deadline, priority, tenant, heads, unbatched=unbatched
    )
    entry.virtual_start = start
    return entry


def texts(count: int, tokens: int = 10, *, bundle: str = "m@1") -> list[Entry]:
    return [text(tokens, bundle=bundle) for _ in range(count)]


def number(given: Entry | Encoding) -> int:
    return int((given.window if isinstance(given, Entry) else given).input_ids[0])


def lengths(entries: Sequence[Entry]) -> list[int]:
    return [entry.tokens for entry in entries]


def echo(width: int, bundle: str, encodings: Sequence[Encoding], heads: Heads = ()) -> Answers:
    """A model that answers each input with its own number."""
    return [{"h": np.array([number(given)], np.float32)} for given in encodings]


def timed(clock: Clock, seconds: Callable[[int], float], widths: list[int] | None = None) -> Any:
    """A model whose batches take this many seconds of the clock, by their width, which is noted."""

    def run(width: int, bundle: str, encodings: Sequence[Encoding], heads: Heads = ()) -> Answers:
        clock.now += seconds(width)
        if widths is not None:
            widths.append(width)
        return echo(width, bundle, encodings)

    return run


def echoed(outcomes: Sequence[Outcome]) -> list[int]:
    return [int(outcome.outputs["h"][0]) for outcome in outcomes]


def costing(cost: Cost, wide: Cost | None = None, slots: int = 1) -> dict[int, Estimator]:
    """Estimators that know the cost and keep to it, because their batches take no time."""
    estimators = {slots: Estimator(), 1: Estimator()}
    estimators[slots].cost = wide or cost
    estimators[1].cost = cost
    return estimators


class Running(NamedTuple):
    """A batch that has started."""

    width: int
    bundle: str
    numbers: list[int]
    thread: str


class Gate:
    """A model whose batches report that they started, then wait until the test lets one through."""

    def __init__(self, answer: Callable[[int, str, Sequence[Encoding]], Any] = echo) -> None:
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Queue[Running] = asyncio.Queue()
        self._passes = threading.Semaphore(0)
        self.started = 0

    def __call__(
        self, width: int, bundle: str, encodings: Sequence[Encoding], heads: Heads = ()
    ) -> Answers:
        numbers = [number(given) for given in encodings]
        running = Running(width, bundle, numbers, threading.current_thread().name)
        self.started += 1
        self._loop.call_soon_threadsafe(self._running.put_nowait, running)
        assert self._passes.acquire(timeout=30)
        return self._answer(width, bundle, encodings)

    async def batch(self) -> Running:
        """The next batch that starts."""
        return await asyncio.wait_for(self._running.get(), 30)

    def let(self, batches: int = 1) -> None:
        self._passes.release(batches)


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@asynccontextmanager
async def serving(
    run: Callable[[int, str, Sequence[Encoding]], Any],
    cost: Cost = FIXED,
    *,
    bundles: Sequence[str] = ("m@1",),
    **options: Any,
) -> AsyncIterator[Batcher]:
    """A running batcher on a clock that stands at zero."""
    batcher = Batcher(run, **{"clock": Clock(), **options})
    for bundle in bundles:
        batcher.add_bundle(bundle, costing(cost))
    await batcher.start()
    try:
        yield batcher
    finally:
        if isinstance(run, Gate):
            run.let(100_000)
        await batcher.stop(30)
        await settle()  # what is learnt of the last batch


Submitted = asyncio.Future[list[EntryOutcome]]


async def submitted(batcher: Batcher, entries: Sequence[Entry]) -> Submitted:
    """A request that has come as far as it can without a slot becoming free."""
    task = batcher.submit(entries)
    await settle()
    return task


async def settle() -> None:
    """Let everything run that does not wait for a replica."""
    for _ in range(10):
        await asyncio.sleep(0)


# The plan


async def test_plan_skips_the_late_and_the_cancelled():
    """Entries that cannot be answered any more are not computed."""
    alive, late, cancelled = text(deadline=10.1), text(deadline=10.0), text()
    future = asyncio.get_running_loop().create_future()
    QueuedRequest(
        [cancelled], future, flow_queue=FlowQueue(cancelled.flow, ModelStatistics({1: Estimator()}))
    )
    future.cancel()
    assert plan([cancelled, late, alive], FIXED, ROOMY, now=10.0) == [alive]


def test_plan_keeps_to_the_bundle_of_its_head():
    """Two models never share a batch."""
    ours = texts(2)
    assert plan([ours[0], text(bundle="other@1"), ours[1]], FIXED, ROOMY, 0.0) == ours


def test_plan_batches_an_unbatched_entry_alone():
    """Such an entry is batched with no other entry."""
    ours, alone = texts(2), text(unbatched=True)
    assert plan([alone, *ours], FIXED, ROOMY, 0.0) == [alone]
    assert plan([ours[0], alone, ours[1]], FIXED, ROOMY, 0.0) == ours


STEEP = Cost(per_run=1e6, per_token=0.01, per_slot=0.0)  # the larger a batch, the better
LONG = Budget(tokens=16_384, size=64, area=2**25)  # B * S * S


@pytest.mark.parametrize(
    ("first", "others", "batch"),
    [
        (8192, [128] * 63, [8192]),
        (128, [8192] + [128] * 62, [128] * 63),
        (8192, [8192], [8192]),
        (4096, [128, 4096], [4096, 4096]),
        (1021, [1017] * 63, [1021] + [1017] * 15),
        (128, [128] * 63, [128] * 64),
    ],
)
def test_plan_bounds_the_pairs_of_slots(first, others, batch):
    """Where attention stores a number for all pairs of slots, a long text shares its batch with no short one."""
    entries = [text(first), *map(text, others)]
    assert batch == lengths(plan(entries, STEEP, LONG, 0.0))


def test_pairs_of_slots_are_counted_as_they_are_laid_out():
    """Two sequences of up to nine tokens have 16 slots each, on a GPU."""
    assert 2 * 16 * 16 == area(2, 9)
    entries = [text(9), text(8)]
    assert [9, 8] == lengths(plan(entries, FIXED, Budget(100, 9, area=512), 0.0))
    assert [9] == lengths(plan(entries, FIXED, Budget(100, 9, area=511), 0.0))


async def test_pairs_of_slots_are_bounded_by_bundle(gate):
    """A bundle's batches, and the rate at which its queue drains, keep to its own bound."""
    async with serving(gate, bundles=["m@1"]) as batcher:
        batcher.add_bundle("biased@1", costing(FIXED), area=2 * 64 * 64)
        for bundle, size in (("biased@1", 2), ("m@1", 4)):
            waiting = await submitted(batcher, texts(4, 64, bundle=bundle))
            for _ in range(4 // size):
                assert size == len((await gate.batch()).numbers)
                gate.let()
            await waiting
        assert FIXED.tokens_per_second([64] * 2) == batcher.load().rates["biased@1"]


CHEAP = Cost(per_run=0.01, per_token=0.01, per_slot=0.0)
QUADRATIC = Cost(0.0, 0.01, 0.001)


@pytest.mark.parametrize(
    ("waiting", "cost", "budget", "batch"),
    [
        ([], FIXED, ROOMY, []),
        ([30, 60, 45], FIXED, Budget(80, 10), [30, 45]),  # goes on after one that does not fit
        ([100, 10], FIXED, Budget(80, 10), [100]),  # more than the budget: alone
        ([10] * 5, FIXED, Budget(10_000, 3), [10] * 3),
        ([100, 10, 98, 12, 400, 105], PADDED, ROOMY, [100, 98, 105]),
        ([100, 10, 400], FIXED, ROOMY, [100, 10, 400]),  # padding costs nothing
        ([300, 3, 290, 4], RECTANGLE, ROOMY, [300, 290]),  # next to 300 tokens, 3 cost 300
        ([60, 50, 40], FIXED, Budget(150, 10), [60, 50, 40]),
        ([5, 400, 400, 9], FIXED, Budget(1000, 10, seconds=1.5), [5, 9]),  # too long together
        ([400, 5, 9], FIXED, Budget(1000, 10, seconds=1.5), [400]),  # a long text: alone
        ([60, 50, 40], RECTANGLE, Budget(150, 10), [60, 50]),  # padding is in the budget
        ([20, 30], RECTANGLE, ROOMY._replace(share=50), [20, 30]),  # and not in the share
        ([20, 30], RECTANGLE, ROOMY._replace(share=49), [20]),
        ([10, 10, 11], LINEAR, ROOMY, [10]),  # batching gains nothing
        ([10, 10, 11], QUADRATIC, ROOMY, [10]),
        ([10] * 60, CHEAP, ROOMY, [10] * 9),  # within a hundredth of the speed of sixty
    ],
)
def test_plan(waiting, cost, budget, batch):
    """A batch starts with the first in line, and takes those that make a token cheaper."""
    entries = [*map(text, waiting)]
    planned = plan(entries, cost, budget, 0.0)
    assert sorted(lengths(planned)) == sorted(batch)
    assert planned[:1] == entries[:1]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8),
    st.tuples(*[st.sampled_from([0.0, 0.01, 0.1, 1.0])] * 3).filter(any),
    st.integers(1, 120),
    st.integers(1, 6),
)
def test_plan_is_never_dearer_than_its_head_alone(sizes, terms, tokens, size):
    """For all costs and budgets, companions make a token cheaper, and the budget holds."""
    cost = Cost(*terms)
    batch = lengths(plan([text(size) for size in sizes], cost, Budget(tokens, size), 0.0))
    assert batch[0] == sizes[0]
    assert len(batch) == 1 or (sum(batch) <= tokens and len(batch) <= size)
    assert len(batch) == 1 or cost.tokens_per_second(batch) > cost.tokens_per_second(batch[:1])


# Answers


async def test_each_entry_of_a_bundle_that_is_served_alone_has_a_batch_of_its_own(gate):
    """Its queue drains at the speed of single entries, other models are batched, and no entry waits for companions."""
    async with serving(gate, bundles=["m@1"], max_wait_ms=60_000) as batcher:
        batcher.add_bundle("alone@1", costing(FIXED), unbatched=True)
        own = texts(3, bundle="alone@1")
        waiting = await submitted(batcher, own)
        batches = []
        for _ in own:
            batches.append((await gate.batch()).numbers)
            gate.let()
        assert batches == [[number(entry)] for entry in own]
        assert echoed(await waiting) == [number(entry) for entry in own]
        assert batcher.load().rates["alone@1"] == FIXED.tokens_per_second([64])
        assert batcher.load().rates["m@1"] == FIXED.tokens_per_second([64] * 64)


@pytest.mark.parametrize("others", [0, 1, 7])
async def test_fixed_batches_depend_on_their_request_alone(gate, others):
    """A request has the same batches, by length and within the limits, whatever waits next to it on any slots."""
    limits = {"max_batch_tokens": 64, "max_batch_size": 3, "slots": 2, "wide": 2}
    async with serving(gate, fixed_batches=True, **limits) as batcher:
        batcher.add_bundle("m@1", costing(FIXED, slots=2))
        asked = [text(tokens, number=-tokens) for tokens in (9, 70, 30, 5, 31, 40, 8, 7, 6)]
        crowd = [batcher.submit(texts(3, 1 + index)) for index in range(others)]
        answer = batcher.submit(asked)
        gate.let(100)
        assert [number(entry) for entry in asked] == echoed(await answer)
        await asyncio.gather(*crowd)
        batches = [await gate.batch() for _ in range(gate.started)]
        own = [[-n for n in batch.numbers] for batch in batches if min(batch.numbers) < 0]

        assert [[5, 6, 7], [8, 9, 30], [31], [40], [70]] == sorted(map(sorted, own))
        assert {1} == {batch.width for batch in batches}


async def test_an_empty_request_has_an_empty_answer():
    """Nothing is queued for it."""
    async with serving(echo) as batcher:
        assert await batcher.submit([]) == []


async def test_outcomes_and_metrics_report_their_batch():
    """30 tokens in a batch padded to 2 x 20 waited a second and ran for two."""
    clock = Clock()
    clock.now = 5.0
    seen = []
    async with serving(timed(clock, lambda _: 2.0), clock=clock, observe=seen.append) as batcher:
        outcomes = await batcher.submit([text(10, arrival=4.0), text(20, arrival=3.0)])
    times = [(o.queue_s, o.inference_s, o.batch_size, o.batch_tokens) for o in outcomes]
    assert times == [(1.0, 2.0, 2, 30), (2.0, 2.0, 2, 30)]
    (stats,) = seen
    assert ("m@1", 2, 30, 40) == (stats.bundle, stats.size, stats.tokens, stats.slots)
    assert [40 / 30] * 2 == pytest.approx([outcomes[0].padding_ratio, stats.padding_ratio])


async def test_outcomes_are_reported_as_their_batches_end():
    """Each entry's outcome is reported once, before the request is answered."""
    gate, told = Gate(), []
    async with serving(gate, max_batch_size=1) as batcher:
        entries = texts(2)
        asked = batcher.submit(entries, lambda entry, outcome: told.append((entry, outcome)))
        await gate.batch()
        gate.let()
        await gate.batch()
        assert [(entries[0], echoed([told[0][1]]))] == [
            (entry, echoed([outcome])) for entry, outcome in told
        ]
        gate.let()
        assert await asked == [outcome for _, outcome in told]


async def test_a_failing_callback_fails_its_request_alone():
    """A callback that raises fails its own request; the others are answered."""

    def on_outcome(*_):
        raise OSError("closed")

    async with serving(echo) as batcher:
        bad = batcher.submit(texts(2), on_outcome)
        good = batcher.submit(texts(2))
        with pytest.raises(errors.InternalError, match="could not be handled"):
            await bad
        assert 2 == len(await good)


async def test_an_answer_has_left_before_anything_is_learnt_of_it():
    """Updating the cost model takes up to a millisecond, and no response waits for it.

    In a process of its own an answer leaves two turns of the event loop after its future is done: a callback of the
    future sends it, and what one turn sends is written together in the next.
    """
    order = []
    estimators = costing(FIXED)
    refine = estimators[1].refine

    def refined(sample):
        order.append("learnt")
        refine(sample)

    estimators[1].refine = refined
    async with serving(echo, bundles=[], observe=lambda _: order.append("told")) as batcher:
        batcher.add_bundle("m@1", estimators)
        await batcher.submit(texts(1))
        order.append("sent")
        await asyncio.sleep(0)
        order.append("written")
    assert order == ["sent", "written", "learnt", "told"]


async def test_the_cost_is_refined_by_real_batches():
    """A model that turns out slower than its estimate is soon known to be."""
    clock, estimators = Clock(), costing(FIXED)
    async with serving(timed(clock, lambda _: 3.0), bundles=[], clock=clock) as batcher:
        batcher.add_bundle("m@1", estimators)
        for _ in range(200):
            await batcher.submit([text(10)])
    assert estimators[1].cost.seconds(10, 1, 10) == pytest.approx(3.0, rel=0.01)


async def test_mask_tokens_count_in_the_expected_time_and_in_the_cost():
    """Their logits cost time: the expected time of a batch, the drain rate and the fitted cost include them."""

    def answer(width, bundle, encodings):
        return [dict.fromkeys(("masks", "other"), np.zeros(1, np.float32)) for _ in encodings]

    gate, clock = Gate(answer), Clock()
    estimators = costing(Cost(1.0, 0.01, 0.0, per_mask=0.5))
    samples = []
    estimators[1].refine = samples.append

    def count_masks(window, heads):
        return len(window) // 2 if heads == ("masks",) else 0

    async with serving(gate, bundles=[], clock=clock, max_batch_size=2) as batcher:
        batcher.add_bundle("m@1", estimators, count_masks=count_masks)
        first = await submitted(batcher, [text(10, heads=("masks",)), text(10, heads=("other",))])
        await gate.batch()
        (running,) = batcher.running
        assert running.expected_s == pytest.approx(1.0 + 0.01 * 20 + 0.5 * 5)
        plain = await submitted(batcher, [text(10, heads=("other",))])
        unmasked = batcher.load().rates["m@1"]
        masked = await submitted(batcher, [text(10, heads=("masks",))])
        assert batcher.load().rates["m@1"] < unmasked
        gate.let(10)
        await asyncio.gather(first, plain, masked)
        await settle()
    assert 10 == sum(sample.masks for sample in samples)


# Order


async def test_one_text_behind_a_thousand_waits_for_one_batch(gate):
    """A single text that arrives while a thousand wait is in the next batch."""
    async with serving(gate, max_batch_size=8) as batcher:
        bulk = await submitted(batcher, texts(1000))
        await gate.batch()
        one = text()
        single = await submitted(batcher, [one])
        gate.let()
        assert number(one) in (await gate.batch()).numbers
        gate.let()
        assert echoed(await single) == [number(one)]
        assert not bulk.done()
        gate.let(1000)
        assert len(await bulk) == 1000


@pytest.mark.parametrize(("before", "ahead"), [(0, {0, 1, 2}), (10, {-1, 0, 1})])
async def test_two_large_requests_share_the_replica_by_tokens(gate, before, ahead):
    """Neither gets more than a batch ahead, and one that comes later does not catch up on what it missed."""
    async with serving(gate, LINEAR) as batcher:  # batches of one
        first, second = texts(20), texts(20 - before)
        await submitted(batcher, first)
        for turn in range(before):
            if turn:
                gate.let()
            await gate.batch()
        await submitted(batcher, second)
        gate.let(1000)
        order = [(await gate.batch()).numbers[0] for _ in range(40 - 2 * before)]
    ours = {number(entry) for entry in first}
    assert {*np.cumsum([1 if taken in ours else -1 for taken in order])} <= ahead


async def test_a_flow_that_was_idle_is_served_next(gate):
    """One model's backlog holds up another's texts, while they are less than its part, by the batch that runs."""
    async with serving(gate, LINEAR, bundles=["a@1", "b@1"]) as batcher:
        for arrival in range(20):
            await submitted(batcher, [text(bundle="a@1", arrival=arrival)])
        for arrival in range(20, 23):
            await gate.batch()
            await submitted(batcher, [text(5, bundle="b@1", arrival=arrival)])
            gate.let()
            assert (await gate.batch()).bundle == "b@1"
            gate.let()


async def test_flows_that_come_together_are_served_as_they_came(gate):
    """Equal charges go by arrival, so no model comes first by its place in a list."""
    async with serving(gate, LINEAR, bundles=["a@1", "b@1", "c@1"]) as batcher:
        await submitted(batcher, [text(bundle="a@1")])
        for arrival, name in enumerate("cb"):
            await submitted(batcher, [text(bundle=f"{name}@1", arrival=arrival)])
        gate.let(100)
        await gate.batch()
        assert [(await gate.batch()).bundle[0] for _ in range(2)] == ["c", "b"]


async def served(
    gate: Gate, batcher: Batcher, flows: dict[str, list[Entry]], tokens: int
) -> Counter[str]:
    """The tokens of each flow among the first ones scheduled, while all flows have more waiting."""
    name_of = {number(entry): name for name, entries in flows.items() for entry in entries}
    await submitted(batcher, [text()])  # so that all wait before any is served
    await gate.batch()
    for entries in flows.values():
        for entry in entries:
            await submitted(batcher, [entry])
    size_of = {number(entry): entry.tokens for entries in flows.values() for entry in entries}
    given: Counter[str] = Counter()
    while given.total() < tokens:
        gate.let()
        for taken in (await gate.batch()).numbers:
            given[name_of[taken]] += size_of[taken]
    return given


@pytest.mark.parametrize("cost", [LINEAR, FIXED, PADDED], ids=["alone", "batched", "by length"])
async def test_tenants_share_by_what_they_use(gate, cost):
    """Of two tenants one has ten times the texts, and another length: each gets half."""
    async with serving(gate, cost, max_batch_size=8) as batcher:
        flows = {
            "many": [text(20, tenant="many") for _ in range(400)],
            "few": [text(30, tenant="few") for _ in range(80)],
        }
        given = await served(gate, batcher, flows, 3000)
    assert given["few"] / given.total() == pytest.approx(0.5, abs=0.1)


async def test_the_classes_share_eight_to_one(gate):
    """Bulk is never starved, however many of its tenants there are it gets no more."""
    async with serving(gate, FIXED, max_batch_size=4) as batcher:
        flows = {"interactive": [text(tenant="i") for _ in range(400)]}
        for tenant in "abc":
            bulk = [text(tenant=tenant, priority=1) for _ in range(100)]
            flows[f"bulk {tenant}"] = bulk
        given = await served(gate, batcher, flows, 3600)
    assert given["interactive"] / given.total() == pytest.approx(8 / 9, abs=0.03)
    for tenant in "abc":
        assert given[f"bulk {tenant}"] / given.total() == pytest.approx(1 / 27, abs=0.02)


@pytest.mark.parametrize("crowd", [1, POOL_MOST + 50], ids=["a few", "more than a plan looks at"])
async def test_no_entry_is_skipped_for_ever(gate, crowd):
    """A second text gets its seat although new single texts, due before it, keep coming."""
    async with serving(gate, LINEAR) as batcher:  # batches of one
        pair = texts(2)
        await submitted(batcher, pair)
        for entry in texts(crowd):
            await submitted(batcher, [entry])
        seats = []
        for _ in range(MAX_SKIPPED + 3):
            await submitted(batcher, texts(1))
            seats.append((await gate.batch()).numbers[0])
            gate.let()
    assert seats.index(number(pair[0])) == 0
    assert MAX_SKIPPED < seats.index(number(pair[1])) <= MAX_SKIPPED + 2


async def test_a_seat_starts_the_count_again(gate):
    """Large requests among single texts get a seat every so often, each of them, and no more."""
    async with serving(gate, LINEAR) as batcher:  # batches of one
        large = [texts(3), texts(3)]
        for entries in large:
            await submitted(batcher, entries)
        order = []
        for _ in range(3 * MAX_SKIPPED):
            await submitted(batcher, texts(1))
            order.append((await gate.batch()).numbers[0])
            gate.let()
    for entries in large:
        first, second, third = [order.index(number(entry)) for entry in entries]
        assert MAX_SKIPPED < second - first <= MAX_SKIPPED + 2
        assert MAX_SKIPPED < third - second <= MAX_SKIPPED + 2


async def test_a_skipped_entry_is_scheduled_once_next_to_other_flows(gate):
    """An entry that is due by skips may also be next by virtual time, and is scheduled once."""
    rng = random.Random(0)
    tasks, seats = [], []
    async with serving(gate, FIXED, max_batch_size=4) as batcher:
        for _ in range(6 * MAX_SKIPPED):
            for tenant in "ab":
                for size in rng.choices([1, 5], weights=[3, 1], k=2):
                    entries = [text(rng.choice([5, 60]), tenant=tenant) for _ in range(size)]
                    tasks.append(await submitted(batcher, entries))
            seats += (await asyncio.wait_for(gate.batch(), 5)).numbers
            gate.let()
        assert len(seats) == len({*seats})
        for task in tasks:
            task.cancel()


async def test_two_bundles_take_turns(gate):
    """Two models with equal backlogs alternate on one slot, and never share a batch."""
    async with serving(gate, bundles=["a@1", "b@1"], max_batch_size=4) as batcher:
        await submitted(batcher, texts(20, bundle="a@1"))
        await submitted(batcher, texts(20, bundle="b@1"))
        gate.let(100)
        assert [(await gate.batch()).bundle for _ in range(10)] == ["a@1", "b@1"] * 5


# Slots


async def test_two_slots_run_in_parallel_each_in_its_own_thread(gate):
    """What waits is shared between idle slots, so that one request uses both."""
    async with serving(gate, slots=2) as batcher:
        request = await submitted(batcher, texts(6))
        running = [await gate.batch(), await gate.batch()]
        assert [batch.width for batch in running] == [1, 1]
        assert [len(batch.numbers) for batch in running] == [3, 3]
        assert len({batch.thread for batch in running}) == 2
        gate.let(2)
        assert len(await request) == 6


async def test_the_thread_that_ran_last_runs_next(gate):
    """What a text needs is then in the caches of one core; both threads have been in use before."""
    async with serving(gate, slots=2) as batcher:
        request = await submitted(batcher, texts(2))
        both = {(await gate.batch()).thread, (await gate.batch()).thread}
        gate.let(2)
        await request
        ran = []
        for _ in range(4):
            request = await submitted(batcher, texts(1))
            ran.append((await gate.batch()).thread)
            gate.let()
            await request
        assert len(both) == 2
        assert len(set(ran)) == 1


async def test_every_slot_has_its_thread_from_the_start():
    before = {*threading.enumerate()}
    async with serving(echo, slots=3):
        assert len({*threading.enumerate()} - before) == 3


@pytest.mark.parametrize(("waiting", "widths"), [(1, [4]), (3, [4]), (4, [1] * 4), (9, [1] * 4)])
async def test_few_texts_take_every_slot_together(gate, waiting, widths):
    """Too few to give each slot one are one batch on all; as many, or more, are a batch on each."""
    async with serving(gate, bundles=[], slots=4, wide=4) as batcher:
        batcher.add_bundle("m@1", costing(FIXED, SOONER, slots=4))
        request = await submitted(batcher, texts(waiting))
        running = [await gate.batch() for _ in widths]
        assert [batch.width for batch in running] == widths
        assert sum(len(batch.numbers) for batch in running) == waiting
        gate.let(4)
        assert len(await request) == waiting


async def test_a_wide_batch_needs_every_slot(gate):
    """While one slot is busy, texts take those that are free, one each; after a wide batch, all are."""
    async with serving(gate, bundles=[], slots=2, wide=2, max_batch_size=1) as batcher:
        batcher.add_bundle("m@1", costing(FIXED, SOONER, slots=2))
        first = await submitted(batcher, texts(2))
        assert [(await gate.batch()).width, (await gate.batch()).width] == [1, 1]
        gate.let()
        later = await submitted(batcher, texts(1))
        assert (await gate.batch()).width == 1
        gate.let(2)
        assert (len(await first), len(await later)) == (2, 1)
        last = await submitted(batcher, texts(1))
        assert (await gate.batch()).width == 2
        held = await submitted(batcher, texts(1))
        gate.let(2)
        assert (await gate.batch()).width == 2
        await asyncio.gather(last, held)


@pytest.mark.parametrize(("narrow", "wide", "chosen"), [(8.0, 4.0, 2), (4.0, 8.0, 1)])
async def test_the_width_is_chosen_by_what_it_costs(narrow, wide, chosen):
    """A lone text runs where it ends sooner; now and then the other width is tried, and each learns its own cost."""
    clock, widths, estimators = Clock(), [], costing(FIXED, slots=2)
    run = timed(clock, {1: narrow, 2: wide}.__getitem__, widths)
    async with serving(run, bundles=[], slots=2, wide=2, clock=clock) as batcher:
        batcher.add_bundle("m@1", estimators)
        for _ in range(40 * TRIAL_EVERY):
            await batcher.submit([text(10)])
    settled = Counter(widths[-10 * TRIAL_EVERY :])
    assert {chosen: 10 * TRIAL_EVERY - 10, 3 - chosen: 10} == settled
    assert estimators[1].cost.seconds(10, 1, 10) == pytest.approx(narrow, rel=0.05)
    assert estimators[2].cost.seconds(10, 1, 10) == pytest.approx(wide, rel=0.05)


async def test_a_choice_that_was_wrong_at_the_start_is_soon_right():
    """What all slots cost was measured in a bad moment: they are tried after a few texts, and taken from then on."""
    clock, widths = Clock(), []
    run = timed(clock, lambda width: FIXED.seconds(10, 1, 10) / width, widths)
    shapes = [(10, 1, 10), (100, 1, 100), (80, 8, 10)]
    estimators = {
        width: Estimator(Sample(*shape, times * FIXED.seconds(*shape)) for shape in shapes)
        for width, times in ((1, 1.0), (2, 2.0))
    }
    async with serving(run, bundles=[], slots=2, wide=2, clock=clock) as batcher:
        batcher.add_bundle("m@1", estimators)
        for _ in range(TRIAL_EVERY):
            await batcher.submit([text(10)])
    assert [1] * (FIRST_TRIAL - 1) + [2] == widths[:FIRST_TRIAL]
    assert widths[FIRST_TRIAL:].count(2) > 0.8 * TRIAL_EVERY


async def test_texts_that_came_while_a_slot_was_busy_ride_together(gate):
    """The busy replica, not a timer, is what makes batches."""
    async with serving(gate) as batcher:
        await submitted(batcher, texts(1))
        later = texts(5)
        for entry in later:
            await submitted(batcher, [entry])
        assert len((await gate.batch()).numbers) == 1
        gate.let()
        assert sorted((await gate.batch()).numbers) == [number(entry) for entry in later]


# Waiting for company


@pytest.mark.parametrize(("second", "size"), [("a@1", 2), ("b@1", 1)])
async def test_max_wait_holds_a_batch_until_it_is_full(gate, second, size):
    """With a minute to wait, one text waits for a companion, but not while a text of another bundle waits."""
    async with serving(
        gate, bundles=["a@1", "b@1"], max_wait_ms=60_000, max_batch_size=2
    ) as batcher:
        await submitted(batcher, texts(1, bundle="a@1"))
        assert gate.started == 0
        await submitted(batcher, texts(1, bundle=second))
        batch = await gate.batch()
        assert ("a@1", size) == (batch.bundle, len(batch.numbers))


@pytest.mark.parametrize(
    ("max_wait_ms", "deadline_s", "least_s", "most_s"),
    [(2, math.inf, 0.002 - 1e-6, math.inf), (60_000, 1.5, 0.0, 1.5)],
    ids=["the wait ends", "the deadline nears"],
)
async def test_a_text_without_companions_is_computed(max_wait_ms, deadline_s, least_s, most_s):
    """It is computed alone when its wait ends, or in time to be answered before its deadline."""
    clock = asyncio.get_running_loop().time
    async with serving(echo, max_wait_ms=max_wait_ms, clock=clock) as batcher:
        now = clock()
        (outcome,) = await batcher.submit([text(arrival=now, deadline=now + deadline_s)])
    assert least_s <= outcome.queue_s < most_s


async def test_an_unbatched_entry_is_not_held():
    """There is no company to wait for."""
    async with serving(echo, max_wait_ms=60_000) as batcher:
        assert len(await asyncio.wait_for(batcher.submit([text(unbatched=True)]), 30)) == 1


async def test_draining_does_not_wait_for_companions():
    """Once no request can come, a held batch leaves."""
    async with serving(echo, max_wait_ms=60_000) as batcher:
        held = await submitted(batcher, texts(1))
        await batcher.stop(30)
        assert len(await held) == 1


async def test_batches_that_run_are_known(gate):
    """What is in a thread, and what it is expected to take, until it is out again."""
    async with serving(gate) as batcher:
        asked = await submitted(batcher, texts(2, 10))
        await gate.batch()
        (running,) = batcher.running
        assert ("m@1", 2, 20, FIXED.seconds(20, 2, 10)) == (
            running.bundle,
            running.size,
            running.tokens,
            running.expected_s,
        )
        gate.let()
        await asked
        assert not batcher.running


# The prefetched batch


def blocking(gate: Gate, started: int, seconds: float = 2.0) -> bool:
    """Whether this many batches start while the event loop is blocked."""
    end = time.monotonic() + seconds
    while gate.started < started and time.monotonic() < end:
        time.sleep(0.001)
    return gate.started >= started


async def test_a_thread_goes_on_before_its_answers_are_read(gate):
    """One batch is prefetched: the thread takes it without the event loop, and no second one."""
    async with serving(gate, LINEAR) as batcher:
        requests = [await submitted(batcher, texts(1)) for _ in range(5)]
        await gate.batch()
        gate.let(5)
        assert blocking(gate, 2)
        assert not blocking(gate, 3, seconds=0.1)
        answers = await asyncio.gather(*requests)
        assert [len(answer) for answer in answers] == [1] * 5
        assert gate.started == 5


async def test_a_prefetched_batch_counts_as_waiting_until_it_begins(gate):
    """It counts as waiting, like the rest of the queue, until it runs."""
    async with serving(gate, LINEAR) as batcher:
        requests = [await submitted(batcher, texts(1)) for _ in range(5)]
        await gate.batch()
        assert batcher.load().queue_tokens == 40
        gate.let()
        await gate.batch()
        await settle()
        assert batcher.load().queue_tokens == 30
        gate.let(4)
        await asyncio.gather(*requests)


@pytest.mark.parametrize(("waiting", "set_out"), [(3, False), (4, True)])
async def test_a_batch_that_waits_for_companions_is_not_prefetched(gate, waiting, set_out):
    """Where as many as it takes are left behind, those that come could make it no better."""
    async with serving(gate, FIXED, max_batch_size=2) as batcher:
        requests = [await submitted(batcher, texts(1)) for _ in range(1 + waiting)]
        await gate.batch()
        gate.let(10)
        assert blocking(gate, 2, seconds=0.1) is set_out
        await asyncio.gather(*requests)


async def test_the_prefetch_of_a_large_request_is_canceled_for_a_new_one(gate):
    """A text that comes meanwhile goes before what is left of it, and each of it is computed once."""
    async with serving(gate, LINEAR) as batcher:
        many = texts(5)
        large = await submitted(batcher, many)
        ran = (await gate.batch()).numbers
        late = text()
        single = await submitted(batcher, [late])
        gate.let()
        ran += (batch := await gate.batch()).numbers
        assert number(late) in batch.numbers
        gate.let(10)
        await asyncio.gather(large, single)
        while len(ran) < 6:
            ran += (await gate.batch()).numbers
        assert sorted(ran) == sorted(map(number, [*many, late]))


async def test_a_prefetch_is_canceled_for_another_flow(gate):
    """The flow with the smallest virtual time gets the slot; the canceled prefetch is next, each entry once."""
    async with serving(gate, LINEAR, bundles=["a@1", "b@1"]) as batcher:
        ours = [text(bundle="a@1") for _ in range(4)]
        requests = [await submitted(batcher, [own]) for own in ours]
        assert (await gate.batch()).numbers == [number(ours[0])]
        other = text(bundle="b@1")
        requests.append(await submitted(batcher, [other]))
        gate.let(10)
        ran = [(await gate.batch()).numbers for _ in range(4)]
        await asyncio.gather(*requests)
        assert ran == [[number(entry)] for entry in (other, *ours[1:])]


async def test_a_batch_is_prefetched_while_several_flows_wait(gate):
    """The next flow is known: new entries of waiting flows do not change it."""
    async with serving(gate, LINEAR, bundles=["a@1", "b@1"]) as batcher:
        ours, others = ([text(bundle=bundle) for _ in range(3)] for bundle in ("a@1", "b@1"))
        requests = [await submitted(batcher, [entry]) for entry in (*ours, *others)]
        assert (await gate.batch()).numbers == [number(ours[0])]
        requests += [await submitted(batcher, [text(bundle=b)]) for b in ("a@1", "b@1")]
        gate.let(10)
        assert blocking(gate, 2)
        assert (await gate.batch()).numbers == [number(others[0])]
        await asyncio.gather(*requests)


async def test_a_canceled_entry_of_a_prefetch_is_not_computed(gate):
    """The next in line takes its place, while the thread still runs the batch before."""
    async with serving(gate, LINEAR) as batcher:
        ours = texts(5)
        requests = [await submitted(batcher, [own]) for own in ours]
        await gate.batch()
        requests[1].cancel()
        await settle()
        gate.let(10)
        assert blocking(gate, 2)
        assert (await gate.batch()).numbers == [number(ours[2])]
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert [isinstance(end, list) for end in ended] == [True, False, True, True, True]
        assert gate.started == 4


async def test_an_entry_canceled_at_its_start_has_no_receiver(gate):
    """The thread began before the cancellation; the waiting entries are still counted right."""
    async with serving(gate, LINEAR) as batcher:
        requests = [await submitted(batcher, texts(1)) for _ in range(5)]
        await gate.batch()
        gate.let()
        assert blocking(gate, 2)
        requests[1].cancel()  # before the loop processes the start of its batch
        await settle()
        assert batcher.load().queue_tokens == 30
        gate.let(10)
        ended = await asyncio.gather(*requests, return_exceptions=True)
        assert [isinstance(end, list) for end in ended] == [True, False, True, True, True]
        assert batcher.load().queue_tokens == 0


async def test_stop_fails_what_is_left_when_the_time_is_over(gate):
    """A replica that hangs does not delay the end: requests fail, and a prefetched batch is not begun."""
    batcher = Batcher(gate, clock=Clock())
    batcher.add_bundle("m@1", costing(LINEAR))
    await batcher.start()
    requests = [await submitted(batcher, texts(1)) for _ in range(5)]
    await gate.batch()
    await batcher.stop(0.01)
    gate.let(10)
    ended = await asyncio.gather(*requests, return_exceptions=True)
    assert {type(end) for end in ended} == {errors.Draining}
    assert not blocking(gate, 2, seconds=0.1)


async def test_a_probe_goes_before_all_that_waits():
    """Under load no slot would be idle for it, so a prefetch is canceled; the probe has no part in the statistics."""
    gate, seen = Gate(), []
    async with serving(gate, LINEAR, observe=seen.append) as batcher:
        requests = [await submitted(batcher, texts(1)) for _ in range(4)]
        await gate.batch()
        probe = asyncio.create_task(batcher.probe("m@1", encoding(5, 77)))
        await settle()
        gate.let(9)
        assert [77] == (await gate.batch()).numbers
        assert 77 == (await probe)["h"][0]
        await asyncio.gather(*requests)
    assert 4 == len(seen)


async def test_probes_take_one_slot_and_many_by_turns(gate):
    """All slots are probed if they are idle; one is probed next to a running batch."""
    async with serving(gate, bundles=[], slots=2, wide=2, max_batch_size=1) as batcher:
        batcher.add_bundle("m@1", costing(SOONER, slots=2))
        gate.let(4)
        for width in (1, 2, 1, 2):
            await batcher.probe("m@1", encoding(5, 1))
            assert width == (await gate.batch()).width
        await submitted(batcher, texts(2))
        probes = [asyncio.create_task(batcher.probe("m@1", encoding(5, 1))) for _ in range(2)]
        assert [1, 1] == [(await gate.batch()).width for _ in range(2)]
        await settle()
        for _ in probes:
            gate.let()
            assert 1 == (await gate.batch()).width
        gate.let(2)
        await asyncio.gather(*probes)


async def test_a_probe_fails_as_the_run_does():
    """What is raised is raised; a bundle that is not served is unknown."""

    def run(width, bundle, encodings, heads=()):
        raise ZeroDivisionError

    async with serving(run) as batcher:
        with pytest.raises(ZeroDivisionError):
            await batcher.probe("m@1", encoding(5, 1))
        with pytest.raises(errors.UnknownModel):
            await batcher.probe("other@1", encoding(5, 1))


# Admission


@pytest.mark.parametrize(("per_token", "retry_s"), [(0.01, 9.0), (1e-6, 1.0), (10.0, 60.0)])
async def test_a_full_queue_is_overloaded_and_says_when_to_retry(gate, per_token, retry_s):
    """900 tokens at 100 a second take 9 seconds. Clients wait for at least a second and at most a minute."""
    async with serving(gate, Cost(0.0, per_token, 0.0), max_queue_tokens=1000) as batcher:
        await submitted(batcher, [text(500)])  # runs, and does not count
        await submitted(batcher, texts(90))
        with pytest.raises(errors.Overloaded) as refusal:
            await batcher.submit(texts(11))
        assert refusal.value.retry_after_s == pytest.approx(retry_s)
        assert batcher.load().queue_tokens == 900
        assert not (await submitted(batcher, texts(10))).done()


async def test_a_request_is_refused_whole(gate):
    """Of a request that does not fit, no entry is queued, and smaller ones still are."""
    async with serving(gate, LINEAR, max_queue_tokens=100) as batcher:
        await submitted(batcher, texts(1))
        await submitted(batcher, texts(5))
        with pytest.raises(errors.Overloaded):
            await batcher.submit(texts(6))
        assert batcher.load().queue_tokens == 50
        await submitted(batcher, texts(5))
        gate.let(100)
        assert len({(await gate.batch()).numbers[0] for _ in range(11)}) == 11


@pytest.mark.parametrize(("limit", "deadline"), [(50, math.inf), (1000, 1.0)], ids=["room", "time"])
async def test_what_was_admitted_before_is_not_refused(gate, limit, deadline):
    """An admitted request is not refused later, neither for the queue's limit nor for its deadline."""
    async with serving(gate, max_queue_tokens=limit) as batcher:
        for entry in texts(2, 40):
            await submitted(batcher, [entry])
        with pytest.raises(errors.Overloaded):
            await batcher.submit([text(40, deadline=deadline)])
        again = await submitted(batcher, [text(40, deadline=deadline, unbatched=True)])
        gate.let(9)
        assert 1 == len(await again)


@pytest.mark.parametrize(
    ("bundles", "error", "said"),
    [
        (["m@1"] * 11, errors.TooLarge, None),  # fits no queue: a retry would not help
        (["other@1"], errors.UnknownModel, "other@1"),
        (["m@1", "n@1"], ValueError, "one bundle"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(bundles, error, said):
    """It is refused before anything is queued."""
    async with serving(echo, bundles=["m@1", "n@1"], max_queue_tokens=100) as batcher:
        with pytest.raises(error, match=said):
            await batcher.submit([text(bundle=bundle) for bundle in bundles])
        assert len(await batcher.submit(texts(10))) == 10


async def test_a_removed_bundle_answers_what_runs_and_fails_what_waits(gate):
    """Unloading a model leaves no request unanswered, and does not change other models."""
    async with serving(gate, LINEAR, bundles=["a@1", "b@1"]) as batcher:
        running = await submitted(batcher, texts(1, bundle="a@1"))
        waiting = await submitted(batcher, texts(1, bundle="a@1"))
        other = await submitted(batcher, texts(1, bundle="b@1"))
        batcher.remove_bundle("a@1")
        with pytest.raises(errors.UnknownModel):
            await batcher.submit(texts(1, bundle="a@1"))
        with pytest.raises(errors.NotReady, match="a@1"):
            await waiting
        assert batcher.load().queue_tokens == 10
        gate.let(2)
        assert len(await running) == len(await other) == 1


async def test_load_predicts_full_batches_of_what_waits_on_all_slots(gate):
    """Two slots, batches of 4 x 10 tokens in 1.4 seconds each: 57 tokens a second."""
    async with serving(gate, slots=2, max_batch_size=4) as batcher:
        for _ in range(3):
            await submitted(batcher, texts(1))
        await submitted(batcher, texts(7))
        load = batcher.load()
    assert load.queue_tokens == 80
    assert load.rates == {"m@1": pytest.approx(2 * 40 / 1.4)}
    assert load.ready


async def test_a_device_that_is_slower_than_expected_is_expected_to_be():
    """Slots get work of a second every two seconds, though no batch took longer: it drains at half the speed."""
    clock, gate, estimators = Clock(), Gate(), costing(LINEAR)
    estimators[1].refine = lambda sample: None
    async with serving(gate, clock=clock, bundles=[]) as batcher:
        batcher.add_bundle("m@1", estimators)
        await submitted(batcher, [text(100)])
        for _ in range(50):
            await submitted(batcher, [text(100)])
        for _ in range(40):
            await gate.batch()
            clock.now += 2.0
            gate.let()
        await gate.batch()
        assert batcher.load().rates["m@1"] == pytest.approx(50.0, rel=0.05)


async def test_what_would_come_too_late_is_refused_early(gate):
    """900 tokens at 100 a second wait: a text of 10 is answered in 9.1 s, and must have two fifths to spare."""
    async with serving(gate, LINEAR) as batcher:
        await submitted(batcher, [text(500)])
        for _ in range(90):
            await submitted(batcher, texts(1))
        with pytest.raises(errors.Overloaded, match=r"in 9\.1 s .* is in 10\.0 s") as refusal:
            await batcher.submit([text(deadline=10.0)])
        assert refusal.value.retry_after_s == pytest.approx(9.1 - 6.0)
        assert not (await submitted(batcher, [text(deadline=16.0)])).done()


async def test_what_is_expected_never_closes_an_empty_queue():
    """An estimate that is too high is corrected only by what runs."""
    async with serving(echo, Cost(0.0, 1000.0, 0.0)) as batcher:
        assert len(await batcher.submit([text(deadline=1.0)])) == 1


async def test_a_text_is_not_refused_for_a_thousand_that_let_it_pass(gate):
    """100 s of one request wait, of which a text waits for as much as it brings."""
    async with serving(gate, LINEAR) as batcher:
        await submitted(batcher, texts(1))
        await submitted(batcher, texts(1000))
        assert not (await submitted(batcher, [text(deadline=1.0)])).done()
        with pytest.raises(errors.Overloaded):
            await batcher.submit([text(100, deadline=1.0)])


async def test_a_full_queue_accepts_a_tenant_below_its_share(gate):
    """One tenant's flood takes from another what it does not use, and nothing else."""
    async with serving(gate, LINEAR, max_queue_tokens=1000) as batcher:
        await submitted(batcher, texts(1))
        await submitted(batcher, [text(tenant="flood") for _ in range(100)])
        with pytest.raises(errors.Overloaded):
            await batcher.submit([text(tenant="flood")])
        assert not (await submitted(batcher, [text(tenant="other") for _ in range(50)])).done()
        with pytest.raises(errors.Overloaded):
            await batcher.submit([text(tenant="other")])
        bulk = [text(tenant="other", priority=1) for _ in range(11)]
        assert not (await submitted(batcher, bulk)).done()
        with pytest.raises(errors.Overloaded):
            await batcher.submit([text(tenant="other", priority=1)])


async def test_a_look_that_is_plain_refuses_and_admits_as_a_close_one():
    """Whether the rates were told before or not, a request is refused by the same limits of room and time."""
    ends = []
    for told in (False, True):
        gate = Gate()
        async with serving(gate, LINEAR, max_queue_tokens=1000) as batcher:
            await submitted(batcher, texts(1))
            await submitted(batcher, texts(40))  # 400 tokens at 100 a second
            refused = []
            for asked in (text(10, deadline=60), text(10, deadline=0.1), text(800, deadline=60)):
                if told:
                    batcher.load()
                try:
                    await submitted(batcher, [asked])
                    refused.append(False)
                except errors.Overloaded:
                    refused.append(True)
            ends.append(refused)
    assert ends == [[False, True, True]] * 2


# Cancelled and late


async def test_a_cancelled_request_leaves_the_queue(gate):
    """Its tokens are free at once, and no replica ever sees its texts."""
    async with serving(gate, max_queue_tokens=100) as batcher:
        first = await submitted(batcher, texts(1))
        gone = await submitted(batcher, texts(10))
        gone.cancel()
        await settle()
        assert batcher.load().queue_tokens == 0
        after = texts(10)
        rest = await submitted(batcher, after)
        gate.let(2)
        await asyncio.gather(first, rest)
    await gate.batch()
    assert (await gate.batch()).numbers == [number(entry) for entry in after]
    assert gate.started == 2


async def test_canceling_a_running_request_affects_no_other(gate):
    """Its companions in the batch are answered, and the rest of it never runs."""
    async with serving(gate, max_batch_size=2) as batcher:
        gone = await submitted(batcher, texts(4))
        await gate.batch()
        other = await submitted(batcher, texts(1))
        gone.cancel()
        gate.let(2)
        assert len(await other) == 1
        assert gate.started == 2


async def test_cancelled_texts_do_not_pile_up(gate):
    """A client that cancels again and again costs no memory while another waits."""
    async with serving(gate, LINEAR) as batcher:
        await submitted(batcher, texts(2 * POOL_MOST))
        arrays = []
        for _ in range(3):
            entries = texts(1000)
            arrays += [weakref.ref(entry.window.input_ids) for entry in entries]
            gone = await submitted(batcher, entries)
            gone.cancel()
            await settle()
        del entries, gone
        await gate.batch()
        gate.let()
        await gate.batch()
        assert sum(array() is not None for array in arrays) < POOL_MOST


async def test_an_answered_request_leaves_nothing_behind():
    """Inputs and outputs are freed with their last reference; the collector has nothing to do."""
    kept = []

    def run(width, bundle, encodings, heads=()):
        answers = echo(width, bundle, encodings)
        kept.extend(weakref.ref(given.input_ids) for given in encodings)
        kept.extend(weakref.ref(answer["h"]) for answer in answers)
        return answers

    gc.disable()
    try:
        async with serving(run) as batcher:
            await batcher.submit(texts(3))
            await batcher.submit(texts(1))
            assert [ref() is None for ref in kept[:6]] == [True] * 6
    finally:
        gc.enable()


async def test_a_late_entry_is_never_run(gate):
    """Its deadline passed before it came: the replica does not see it."""
    clock = Clock()
    clock.now = 10.0
    async with serving(gate, clock=clock) as batcher:
        with pytest.raises(errors.DeadlineExceeded):
            await batcher.submit([text(deadline=10.0)])
    assert gate.started == 0


async def test_a_request_that_grows_late_in_the_queue_fails_when_a_batch_ends(gate):
    """Its other texts go with it, and those that still have time are served."""
    clock = Clock()
    async with serving(gate, clock=clock) as batcher:
        await submitted(batcher, texts(1))
        late = await submitted(batcher, [text(deadline=9.0), text()])
        later = await submitted(batcher, [text(deadline=11.0)])
        clock.now = 10.0
        gate.let(2)
        with pytest.raises(errors.DeadlineExceeded):
            await late
        assert len(await later) == 1
        assert batcher.load().queue_tokens == 0


# Failures


def failure(outcomes: Sequence[EntryOutcome]) -> str:
    """The message of the first entry that failed."""
    return next(o.message for o in outcomes if isinstance(o, errors.InferenceFailed))


def poisoned(*bad: int) -> Callable[[int, str, Sequence[Encoding]], Answers]:
    def run(width: int, bundle: str, encodings: Sequence[Encoding], heads: Heads = ()) -> Answers:
        if any(number(given) in bad for given in encodings):
            raise RuntimeError("poison")
        return echo(width, bundle, encodings)

    return run


async def test_a_bad_input_fails_alone():
    """Of eight requests in one batch, the one that breaks the model gets the error, with cause."""
    bad = text()
    singles = [*texts(5), bad, *texts(2)]
    gate = Gate(poisoned(number(bad)))
    async with serving(gate) as batcher:
        await submitted(batcher, texts(1))
        requests = [await submitted(batcher, [entry]) for entry in singles]
        gate.let(100)
        answers = [outcome for (outcome,) in await asyncio.gather(*requests)]
        await gate.batch()
        assert len((await gate.batch()).numbers) == 8
    failed = [answer for answer in answers if isinstance(answer, errors.InferenceFailed)]
    assert failed == [answers[5]]
    assert gate.started == 1 + 7  # halves, not one by one
    assert str(failed[0].__cause__) == "poison"


async def test_each_entry_has_an_outcome():
    """The outcome of an entry that fails is its error, which is reported and counted; the others have outputs."""
    bad, odd, told, seen = text(), text(), [], []

    def run(width, bundle, encodings, heads=()):
        answers = poisoned(number(bad))(width, bundle, encodings)
        return [
            {"h": np.full(1, math.nan, np.float32)} if number(given) == number(odd) else answer
            for given, answer in zip(encodings, answers, strict=True)
        ]

    entries = [*texts(3), bad, *texts(2), odd]
    async with serving(run, observe=seen.append) as batcher:
        outcomes = await batcher.submit(entries, lambda *of: told.append(of))
    failed = {i: o for i, o in enumerate(outcomes) if isinstance(o, errors.InferenceFailed)}
    assert {3: "the model failed", 6: "not finite"} == {
        index: next(said for said in ("the model failed", "not finite") if said in error.message)
        for index, error in failed.items()
    }
    good = [0, 1, 2, 4, 5]
    assert [number(entries[i]) for i in good] == echoed([outcomes[i] for i in good])
    assert dict(zip(entries, outcomes, strict=True)) == dict(told)
    assert {bad, odd} == {entry for stats in seen for entry, *_ in stats.failed}


def several(entries: Sequence[Entry]) -> Entry:
    """An entry of the texts of several."""
    return Entry("m@1", join([entry.window for entry in entries]), "r", 0.0, math.inf)


def rows_of(run: Any) -> Any:
    """A model that answers windows of several texts as another one answers texts."""

    def answer(width: int, bundle: str, windows: Sequence[Window], heads: Heads = ()) -> Answers:
        answers = []
        for window in windows:
            found = run(width, bundle, divide(window) if window.lengths else [window], heads)
            rows = np.stack([own["h"] for own in found])
            answers.append({"h": rows if window.lengths else rows[0]})
        return answers

    return answer


async def test_a_text_of_several_fails_alone():
    """Of an entry with several texts, only those fail for which the model fails or is not finite."""
    bad, odd, seen = text(), text(), []

    def run(width, bundle, encodings, heads=()):
        answers = poisoned(number(bad))(width, bundle, encodings)
        return [
            {"h": np.full(1, math.nan, np.float32)} if number(given) == number(odd) else answer
            for given, answer in zip(encodings, answers, strict=True)
        ]

    alone, first, last = text(), text(), text()
    entries = [alone, several([first, bad, odd, last]), several([bad, bad]), several([last, odd])]
    async with serving(rows_of(run), observe=seen.append) as batcher:
        one, some, none, half = await batcher.submit(entries)
    assert [number(alone)] == one.outputs["h"].tolist()
    assert [[number(first)], [0], [0], [number(last)]] == some.outputs["h"].tolist()
    assert [1, 2] == [*some.failed]
    assert "the model failed" in some.failed[1].message
    assert "not finite" in some.failed[2].message
    assert isinstance(none, errors.InferenceFailed)
    assert ([[number(last)], [0]], [1]) == (half.outputs["h"].tolist(), [*half.failed])
    failed = sorted(number(window) for stats in seen for _, window, _ in stats.failed)
    assert sorted([*[number(bad)] * 3, *[number(odd)] * 2]) == failed
    assert 9 == sum(stats.size for stats in seen)


async def test_a_batch_holds_no_more_texts_than_the_limit():
    """The texts of an entry count one by one, in the size of a batch and in the load."""
    seen = []
    async with serving(rows_of(echo), observe=seen.append, max_batch_size=4) as batcher:
        assert (4, 1) == (batcher.load().entry_size, batcher.load().slots)
        entries = [several(texts(3)), several(texts(2)), *texts(2)]
        await batcher.submit(entries)
    assert 7 == sum(stats.size for stats in seen)
    assert max(stats.size for stats in seen) <= 4


def two_heads(width: int, bundle: str, encodings: Sequence[Encoding], heads: Heads = ()) -> Answers:
    return [{"h": np.ones(1, np.float32), "broken": np.full(1, np.inf, np.float32)}] * len(
        encodings
    )


async def test_only_the_requested_head_is_checked_and_returned():
    """A head whose output overflows on this text does not fail requests for another head."""
    async with serving(two_heads) as batcher:
        (outcome,) = await batcher.submit([text(heads=("h",))])
        assert list(outcome.outputs) == ["h"]
        for heads in (("broken",), ()):
            assert "not finite" in failure(await batcher.submit([text(heads=heads)]))
        assert "no output 'absent'" in failure(await batcher.submit([text(heads=("absent",))]))


async def test_a_batch_computes_the_heads_of_its_entries():
    """It computes those that an entry names, and all where an entry names none."""
    computed = []

    def run(width, bundle, encodings, heads):
        computed.append({*heads})
        return [{"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)} for _ in encodings]

    async with serving(run) as batcher:
        for named in ([("a",), ("a",)], [("a",), ("b", "a")], [("a",), ()]):
            await batcher.submit([text(heads=heads) for heads in named])
    assert [{"a"}, {"a", "b"}, set()] == computed


async def test_a_wrong_number_of_results_fails_the_batch():
    """The missing result cannot be identified, so no entry gets another entry's result."""
    async with serving(
        lambda width, bundle, encodings, heads: echo(width, bundle, encodings)[1:]
    ) as batcher:
        assert "our bug: a batch of 3 gave 2 results" in failure(await batcher.submit(texts(3)))


async def test_failures_do_not_teach_the_cost():
    """The time of a batch that was halved and run again is not the time of a batch."""
    clock = Clock()

    def run(width, bundle, encodings, heads=()):
        clock.now += 100.0
        raise RuntimeError

    async with serving(run, clock=clock) as batcher:
        for _ in range(20):
            assert failure(await batcher.submit(texts(2)))
        assert batcher.load().rates == {"m@1": FIXED.tokens_per_second([64] * 64)}


async def test_a_batch_that_is_lost_fails_alone(caplog):
    """A bug in a replica's thread fails the requests of its batch, is logged, and ends nothing."""

    def run(width, bundle, encodings, heads=()):
        return echo(width, bundle, encodings) if len(encodings[0]) > 1 else [None]

    async with serving(run) as batcher:
        with pytest.raises(errors.InferenceFailed, match="our bug: the batch was lost"):
            await batcher.submit(texts(1, tokens=1))
        assert len(await batcher.submit(texts(1, tokens=2))) == 1
    assert "TypeError" in caplog.text


async def test_an_observer_that_fails_ends_nothing(caplog):
    """An error in the metrics is logged, and requests are answered."""

    def broken(stats):
        raise ZeroDivisionError

    async with serving(echo, observe=broken) as batcher:
        for _ in range(2):
            assert len(await batcher.submit(texts(1))) == 1
    assert "ZeroDivisionError" in caplog.text


async def test_a_batcher_that_breaks_fails_every_waiter(caplog):
    """After a bug in the batcher, no request hangs, none is accepted or served, and it is logged once."""

    def broken():
        raise ZeroDivisionError

    async with serving(echo, clock=broken) as batcher:
        with pytest.raises(errors.InferenceFailed, match="our bug"):
            await batcher.submit(texts(1))
        with pytest.raises(errors.NotReady):
            await batcher.submit(texts(1))
        assert not batcher.load().ready
        batcher.remove_bundle("m@1")  # a message without a receiver
    assert "ZeroDivisionError" in caplog.text
    assert 1 == caplog.text.count("the batcher broke")


# A life


async def test_a_batcher_that_was_not_started_is_not_ready():
    """Requests before the start are refused, not kept."""
    batcher = Batcher(echo)
    batcher.add_bundle("m@1", {1: Estimator()})
    assert not batcher.load().ready
    with pytest.raises(errors.NotReady):
        await batcher.submit(texts(1))
    await batcher.stop(0)


async def test_stop_answers_everything_that_was_accepted(gate):
    """New requests are refused at once, old ones are served to the last, and no thread is left."""
    async with serving(gate, max_batch_size=2, slots=2) as batcher:
        accepted = await submitted(batcher, texts(20))
        stopping = asyncio.create_task(batcher.stop(30))
        await settle()
        with pytest.raises(errors.Draining):
            await batcher.submit(texts(1))
        assert not batcher.load().ready
        gate.let(1000)
        await stopping
        assert len(await accepted) == 20
        assert not [t for t in threading.enumerate() if t.name.startswith("replica-")]


# Everything at once


class Arrival(NamedTuple):
    """A request of a random script."""

    lengths: list[int]
    tenant: str
    kind: str  # of its last text: good, poison (breaks the model), nan
    patience: int | None  # turns of the event loop until it is cancelled
    pause: int  # turns until the next request comes


arrivals = st.builds(
    Arrival,
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.sampled_from("ab"),
    st.sampled_from(["good"] * 5 + ["poison", "nan"]),
    st.none() | st.integers(0, 20),
    st.integers(0, 6),
)
costs = st.sampled_from([FIXED, LINEAR, PADDED])


def moody(width: int, bundle: str, encodings: Sequence[Encoding], heads: Heads = ()) -> Answers:
    """Echo, but a first token type of 1 breaks the model, and one of 2 the result."""
    moods = [int(given.token_type_ids[0]) for given in encodings]
    assert 1 not in moods, "poison"
    return [
        {"h": np.array([math.nan if mood == 2 else number(given)], np.float32)}
        for mood, given in zip(moods, encodings, strict=True)
    ]


async def played(script: list[Arrival], batcher: Batcher, bundles: list[str]) -> None:
    """Play the script; check that every request got what is its own."""
    tasks: list[tuple[Arrival, list[Entry], Submitted]] = []
    for turn, arrival in enumerate(script):
        bundle = bundles[turn % len(bundles)]
        entries = [text(n, bundle=bundle, tenant=arrival.tenant) for n in arrival.lengths]
        mood = ["good", "poison", "nan"].index(arrival.kind)
        entries[-1].window.token_type_ids[0] = mood
        tasks.append((arrival, entries, batcher.submit(entries)))
        if arrival.patience is not None:
            asyncio.get_running_loop().create_task(impatient(tasks[-1][2], arrival.patience))
        for _ in range(arrival.pause):
            await asyncio.sleep(0)
    for arrival, entries, task in tasks:
        try:
            *before, last = await task
            assert echoed(before) == [number(entry) for entry in entries[:-1]]
            assert isinstance(last, errors.InferenceFailed) == (arrival.kind != "good")
            assert arrival.kind != "good" or echoed([last]) == [number(entries[-1])]
        except asyncio.CancelledError:
            assert arrival.patience is not None
    await settle()
    assert batcher.load().queue_tokens == 0


async def impatient(task: Submitted, turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()


@settings(max_examples=60)
@given(
    st.lists(arrivals, min_size=1, max_size=15),
    costs,
    st.integers(1, 3),
    st.integers(1, 80),
    st.integers(1, 8),
)
def test_every_request_gets_its_own_answer(script, cost, slots, tokens, size):
    """Whatever comes, is cancelled or fails, in any batches: own answers, own errors, none lost."""
    bundles = ["a@1", "b@1"]
    options = {"slots": slots, "max_batch_tokens": tokens, "max_batch_size": size}

    async def play():
        async with serving(moody, cost, bundles=bundles, **options) as batcher:
            await asyncio.wait_for(played(script, batcher, bundles), 60)

    asyncio.run(play())
