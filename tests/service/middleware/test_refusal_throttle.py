"""Refusals are sent at once while they are few; in a flood each is delayed, and the number of delays is limited."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine

import pytest

from service.middleware.refusal_throttle import RefusalThrottle


class Leaping(selectors.DefaultSelector):
    """Does not wait: the time that a loop would sleep is over at once. Nothing else moves its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def leaping_loop() -> asyncio.AbstractEventLoop:
    selector = Leaping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    return loop


def on_leaping_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=leaping_loop) as runner:
            runner.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def turns(throttle: RefusalThrottle, count: int) -> list[float]:
    """Seconds for which each of this many simultaneous refusals was delayed."""
    time = asyncio.get_running_loop().time
    began = time()

    async def turn() -> float:
        await throttle.turn()
        return time() - began

    return await asyncio.gather(*[turn() for _ in range(count)])


@on_leaping_loop
async def test_few_are_not_held_back():
    """As many as the time allows for which one may be held, and one more, may go together after a pause."""
    await asyncio.sleep(1)
    assert await turns(RefusalThrottle(per_s=10, held_s=0.5), 6) == [0.0] * 6


@on_leaping_loop
async def test_many_take_turns():
    """Those beyond go one in each tenth of a second that follows, in order."""
    await asyncio.sleep(1)
    held = await turns(RefusalThrottle(per_s=10, held_s=0.5), 9)
    assert held == pytest.approx([0.0] * 6 + [0.1, 0.2, 0.3])


@on_leaping_loop
async def test_no_refusal_is_delayed_longer():
    """The delay has a limit for any number of refusals."""
    held = await turns(RefusalThrottle(per_s=10, held_s=0.2), 100)
    assert max(held) == pytest.approx(0.2)


@on_leaping_loop
async def test_no_more_are_held_than_that():
    """The one that has waited longest goes instead."""
    await asyncio.sleep(1)
    throttle = RefusalThrottle(per_s=1, held_s=10, most=3)
    waiting = [asyncio.create_task(throttle.turn()) for _ in range(20)]
    await asyncio.sleep(0.05)
    assert [task.done() for task in waiting] == [True] * 17 + [False] * 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@on_leaping_loop
async def test_a_disconnected_client_ends_its_delay():
    """A delay that no client waits for any more has no effect."""
    throttle = RefusalThrottle(per_s=20, held_s=1, most=100)
    waiting = [asyncio.create_task(throttle.turn()) for _ in range(25)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.sleep(2)
    assert not throttle._held


def chain(throttle: RefusalThrottle, gone: list[int], name: int, left: int) -> Callable[[], None]:
    """A refusal that schedules the next one of its connection, `left` times, as with pipelined requests."""

    def go() -> None:
        gone.append(name)
        if left:
            throttle.hold(chain(throttle, gone, name, left - 1))

    return go


@on_leaping_loop
async def test_refusals_that_follow_each_other_do_not_nest():
    """Neither evicted refusals nor those that go together after a pause recurse."""
    await asyncio.sleep(1000)
    gone = []
    throttle = RefusalThrottle(per_s=1, held_s=1000, most=100)
    for name in range(300):
        throttle.hold(chain(throttle, gone, name, 99))
    while len(gone) < 30_000:
        await asyncio.sleep(1)
    assert [100] * 300 == [gone.count(name) for name in range(300)]


@on_leaping_loop
async def test_a_refusal_that_fails_affects_no_other():
    """Its exception does not reach the connection whose refusal evicts it."""
    await asyncio.sleep(1)
    loop, gone, errors = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail():
        raise ZeroDivisionError

    throttle = RefusalThrottle(per_s=1, held_s=1, most=1)
    throttle.hold(lambda: None)
    throttle.hold(lambda: None)
    throttle.hold(fail)
    throttle.hold(lambda: gone.append(1))
    await asyncio.sleep(2)
    assert ([1], [ZeroDivisionError]) == (gone, [type(error) for error in errors])
