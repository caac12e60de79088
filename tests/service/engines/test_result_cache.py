"""Remembered results equal computed ones, end with their model, and tell no tenant what others asked."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from service.core.encode import Window
from service.engines.result_cache import ENTRY_BYTES, ResultCache
from service.errors import InferenceFailed, ReplicaLost
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, Outcome
from service.scheduling.load import Load

MODELS = {"m@1": "a", "n@1": "b"}


class CountingDevice:
    """Computes random outputs, so that equal ones were computed once, and waits while `hold` is cleared."""

    max_queue_tokens = 1000

    def __init__(self) -> None:
        self.computed: list[int] = []  # the first token of each window
        self.hold = asyncio.Event()
        self.hold.set()
        self.error: Exception | None = None
        self.failed: set[int] = set()
        self._random = np.random.default_rng(0)

    async def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> list[EntryOutcome]:
        self.computed += [int(entry.window.input_ids[0]) for entry in entries]
        await self.hold.wait()
        if self.error:
            raise self.error
        outcomes = [self._outcome(entry) for entry in entries]
        if on_outcome is not None:
            for entry, outcome in zip(entries, outcomes, strict=True):
                on_outcome(entry, outcome)
        return outcomes

    def _outcome(self, entry: Entry) -> EntryOutcome:
        if int(entry.window.input_ids[0]) in self.failed:
            return InferenceFailed("no")
        outputs = {head: self._random.random(64, np.float32) for head in entry.heads}
        return Outcome(outputs, 0.1, 0.2, 3, 30, 1.5)

    def load(self) -> Load:
        return Load()

    def loads(self) -> dict[str, Load]:
        return {}

    def alive(self) -> bool:
        return True


class Cached:
    """A cache on such a device."""

    def __init__(self, max_bytes: int = 2**20, shared: bool = False) -> None:
        self.device = CountingDevice()
        self.found: Counter[str] = Counter()
        self.cache = ResultCache(cast(Any, self.device), max_bytes, shared, self.found.update)
        self.cache.keep(MODELS)

    async def ask(self, *ids: int, on_outcome: OnOutcome | None = None, **fields: Any) -> list[Any]:
        """The outputs of one head for a window of each token, or the error."""
        outcomes = await self.cache.submit([window(i, **fields) for i in ids], on_outcome)
        return [o.outputs["h"] if isinstance(o, Outcome) else o for o in outcomes]


def window(token: int, hidden: int = 0, **fields: Any) -> Entry:
    ids = np.array([token, 7], np.int64)
    values = {"bundle": "m@1", "heads": ("h",), "tenant": "t", **fields}
    return Entry(
        window=Window(ids, 0 * ids, hidden=hidden),
        request_id="r",
        arrival=0.0,
        deadline=9e9,
        **values,
    )


def equal(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


async def test_equal_windows_are_computed_once():
    cached = Cached()
    first = await cached.ask(1, 2, 1)
    reported: list[Entry] = []
    again = await cached.ask(2, 1, 3, on_outcome=lambda entry, _: reported.append(entry))
    assert cached.device.computed == [1, 2, 3]
    assert equal([first[0], first[1]], [first[2], again[0]])
    assert equal([first[0]], [again[1]])
    assert len(reported) == 3
    assert cached.found == {"computed": 3, "joined": 1, "hit": 2}
    with pytest.raises(ValueError, match="read-only"):
        again[0][0] = 0.0


@pytest.mark.parametrize(
    "other", [{"tenant": "u"}, {"bundle": "n@1"}, {"heads": ("h", "i")}, {"hidden": 1}]
)
async def test_outputs_depend_on_all_parts_of_the_key(other):
    cached = Cached()
    assert not equal(await cached.ask(1), await cached.ask(1, **other))


async def test_tenants_share_results_only_if_that_is_set():
    cached = Cached(shared=True)
    assert equal(await cached.ask(1), await cached.ask(1, tenant="u"))


async def test_requests_in_flight_share_a_computation():
    """But none waits for a request of a lower class, which may wait for long."""
    cached = Cached()
    cached.device.hold.clear()
    asking = [asyncio.create_task(cached.ask(1, priority=p)) for p in (1, 1, 0, 0)]
    await asyncio.sleep(0)
    cached.device.hold.set()
    bulk, joined, urgent, last = await asyncio.gather(*asking)
    assert len(cached.device.computed) == 2
    assert equal(bulk, joined)
    assert equal(urgent, last)


@pytest.mark.parametrize("ending", ["cancelled", "lost"])
async def test_a_request_that_waits_for_a_failed_one_is_computed(ending):
    cached = Cached()
    cached.device.hold.clear()
    first, second = (asyncio.create_task(cached.ask(1)) for _ in range(2))
    await asyncio.sleep(0)
    if ending == "cancelled":
        first.cancel()
    else:
        cached.device.error = ReplicaLost("gone")
        cached.device.hold.set()
    with pytest.raises((asyncio.CancelledError, ReplicaLost)):
        await first
    cached.device.error = None
    cached.device.hold.set()
    assert len(await second) == 1
    assert cached.device.computed == [1, 1]


async def test_a_cancelled_waiting_request_does_not_cancel_the_first():
    cached = Cached()
    cached.device.hold.clear()
    first, second = (asyncio.create_task(cached.ask(1)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    cached.device.hold.set()
    assert len(await first) == 1


async def test_errors_are_not_remembered():
    cached = Cached()
    cached.device.failed = {1}
    assert isinstance((await cached.ask(1, 2))[0], InferenceFailed)
    cached.device.failed = set()
    assert isinstance((await cached.ask(1))[0], np.ndarray)
    assert cached.device.computed == [1, 2, 1]


async def test_bytes_are_bounded_and_the_least_recently_used_go_first():
    size = ENTRY_BYTES + 64 * 4
    cached = Cached(max_bytes=3 * size)
    await cached.ask(1, 2, 3)
    await cached.ask(1)
    await cached.ask(4)
    assert cached.cache.bytes == 3 * size
    await cached.ask(1, 3, 4)
    assert cached.device.computed == [1, 2, 3, 4]
    await cached.ask(2)
    assert cached.device.computed == [1, 2, 3, 4, 2]


async def test_results_end_with_their_model():
    """So do results of heads in other bundles, and results that are still being computed when it leaves."""
    cached = Cached()
    shared = {"heads": ("n@1/h",)}
    await cached.cache.submit([window(1), window(2, **shared)])
    cached.device.hold.clear()
    late = asyncio.create_task(cached.ask(5, bundle="n@1"))
    await asyncio.sleep(0)
    cached.cache.keep({"m@1": "a"})
    cached.device.hold.set()
    await late
    cached.cache.keep(MODELS)
    await cached.cache.submit([window(1), window(2, **shared), window(5, bundle="n@1")])
    assert cached.device.computed == [1, 2, 5, 2, 5]
    cached.cache.keep({**MODELS, "m@1": "other"})
    await cached.ask(1)
    assert cached.device.computed[-1] == 1


@pytest.mark.nightly
async def test_a_million_hits_have_the_computed_bytes():
    cached = Cached()
    computed = [output.tobytes() for output in await cached.ask(*range(1000))]
    for _ in range(1000):
        assert computed == [output.tobytes() for output in await cached.ask(*range(1000))]
    assert cached.found == {"computed": 1000, "joined": 0, "hit": 1_000_000}
