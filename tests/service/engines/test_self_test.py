"""A session that can no longer do what it could is noticed, and one that is busy is left alone."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from service import liveness
from service.core.encode import Window
from service.core.goldens import Golden
from service.core.manifest import Tolerance
from service.engines.self_test import SelfTest, SelfTests, smallest

WINDOW = Window(np.array([2, 3]), np.array([0, 0]))
EXPECTED = {"sentiment": np.array([1.0, -2.0], np.float32), "other": np.ones(3, np.float32)}


def known(tolerance: Tolerance | None = None) -> SelfTest:
    return SelfTest(WINDOW, EXPECTED, tolerance or Tolerance(max_difference=1e-3))


class Session:
    """Gives what was expected, or something else, or raises."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.change: dict[str, Any] = {}
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.tries: list[tuple[str, bool]] = []
        self.self_tests = SelfTests(self.probe, lambda *tried: self.tries.append(tried))

    async def probe(self, bundle: str, window: Window) -> dict[str, Any]:
        assert window is WINDOW
        self.asked.append(bundle)
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return EXPECTED | self.change

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def trying(*bundles: str) -> AsyncIterator[Session]:
    session = Session()
    for bundle in bundles:
        session.self_tests.add(bundle, known())
    running = asyncio.create_task(session.self_tests.run())
    try:
        yield session
    finally:
        running.cancel()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SELF_TEST_S", 0.01)
    monkeypatch.setattr(liveness, "SELF_TEST_POLL_S", 0.001)


async def test_each_bundle_is_tried_in_turn():
    """Again and again, and all is well."""
    async with trying("a@1", "b@1") as session:
        await session.until(lambda: len(session.tries) >= 4)
        assert ["a@1", "b@1", "a@1", "b@1"] == session.asked[:4]
        assert {True} == {well for _, well in session.tries}
        assert "" == session.self_tests.problem
        assert not session.self_tests.lost


async def test_what_fails_three_times_is_lost(lines):
    """The first failure is reported at once; the third in a row is the last."""
    async with trying("a@1") as session:
        await session.until(lambda: bool(session.tries))
        session.error = RuntimeError("no memory\nat all")
        await session.until(lambda: bool(session.self_tests.problem))
        assert "the canary of a@1 failed: no memory at all" == session.self_tests.problem
        assert not session.self_tests.lost
        await session.until(lambda: session.self_tests.lost)
    assert [("a@1", 1), ("a@1", 2), ("a@1", 3)] == [
        (line["model"], line["in_a_row"]) for line in lines
    ]


async def test_what_goes_well_again_is_well():
    """A failure that passes is forgotten."""
    async with trying("a@1") as session:
        session.error = RuntimeError()
        await session.until(lambda: len(session.tries) == 2)
        assert "RuntimeError()" in session.self_tests.problem
        session.error = None
        await session.until(lambda: not session.self_tests.problem)
        session.error = RuntimeError()
        await session.until(lambda: bool(session.self_tests.problem))
        assert not session.self_tests.lost


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"other": np.array([1, np.nan, 1], np.float32)}, "other is not finite"),
        ({"sentiment": np.array([1, -2.1], np.float32)}, "sentiment differs by 5.00e-02"),
    ],
)
async def test_wrong_answers_are_failures(change, problem):
    """The results must be numbers, and equal the results at the start."""
    async with trying("a@1") as session:
        session.change = change
        await session.until(lambda: bool(session.self_tests.problem))
        assert problem in session.self_tests.problem


def test_what_may_change_is_for_the_bundle_to_say():
    """A head that is held to a cosine is held to that."""
    near = EXPECTED | {"sentiment": np.array([1.0, -2.1], np.float32)}
    assert "" == known(Tolerance(min_cosine={"sentiment": 0.99})).compare(near)
    assert "cosine" in known(Tolerance(min_cosine={"sentiment": 0.9999})).compare(near)


async def test_a_bundle_that_is_busy_and_well_is_left_alone():
    """As long as its own batches show how it is; the others are tried."""
    async with trying("a@1", "b@1") as session:
        session.self_tests._of["a@1"].well = math.inf
        await session.until(lambda: len(session.tries) == 3)
        assert ["b@1"] * 3 == session.asked
        session.self_tests.ended_well("a@1")
        await session.until(lambda: "a@1" in session.asked)


def test_a_bundle_is_due_when_nothing_shows_that_it_is_well():
    """So long after its last batch that ended well, or its last try, and no longer: a look is a tenth of a second."""
    one = known()
    one.well = one.tried = 100.0
    assert not one.due(100.005)
    assert one.due(100.02)
    one.well = 200.0
    assert not one.due(200.005)
    assert one.due(200.02)
    one.problem = "no memory"
    assert one.due(200.005)
    one.tried = 200.0
    assert not one.due(200.005)


async def test_what_failed_is_tried_whatever_its_batches_say():
    """Or load would hide that it is well again, or that it is not."""
    async with trying("a@1") as session:
        session.error = RuntimeError()
        await session.until(lambda: bool(session.self_tests.problem))
        session.self_tests._of["a@1"].well = math.inf
        await session.until(lambda: session.self_tests.lost)


async def test_a_bundle_that_is_gone_is_not_missed():
    """It is not tried again, and what was wrong with it is forgotten, though it was being tried."""
    async with trying("a@1") as session:
        session.error, session.hold = RuntimeError(), asyncio.Event()
        await session.until(lambda: bool(session.asked))
        session.self_tests.remove("a@1")
        session.hold.set()
        await asyncio.sleep(0.03)
        assert "" == session.self_tests.problem
        assert ["a@1"] == session.asked
        assert [] == session.tries


def test_the_smallest_golden_is_the_canary():
    """Its own tokens, wherever it stands."""
    golden = Golden(np.arange(9), np.arange(9) % 2, np.array([4, 2, 3]), {})
    window = smallest(golden)
    assert ([4, 5], [0, 1]) == (window.input_ids.tolist(), window.token_type_ids.tolist())


def test_the_smallest_golden_has_a_mask_token_where_a_head_needs_one():
    """Otherwise the self-test would compare no output of a fill-mask head."""
    golden = Golden(np.array([1, 2, 3, 7, 4, 7, 7, 5]), np.zeros(8, int), np.array([2, 3, 3]), {})
    assert [1, 2] == smallest(golden).input_ids.tolist()
    assert [3, 7, 4] == smallest(golden, 7).input_ids.tolist()
    assert [1, 2] == smallest(golden, 9).input_ids.tolist()
