"""Large texts share the text threads by class and tenant, and long ones leave a thread to shorter ones."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from service.scheduling.load import Flow
from service.scheduling.text_threads import GUESS, LONG_CHARACTERS, THREADS, TextThreads
from tests.service.fakes import Clock

LONG, SHORT = LONG_CHARACTERS + 1, 10_000
BULK = Flow("m@1", 1, "crawler")
APP = Flow("m@1", 0, "app")
WAIT_S = 30


class Bench:
    """Text threads with a clock, and the order in which their parts ran."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.threads = TextThreads(self.clock)
        self.ran: list[str] = []
        self.held: list[threading.Event] = []

    def hold(self, flow: Flow, size: int) -> asyncio.Task[None]:
        """Run a part that ends with `release`."""
        event = threading.Event()
        self.held.append(event)

        def work() -> None:
            assert event.wait(WAIT_S)
            self.clock.now += size / GUESS

        return asyncio.create_task(self.threads.run(flow, size, work))

    def run(
        self, name: str, flow: Flow, size: int = SHORT, seconds: float = SHORT / GUESS
    ) -> asyncio.Task[None]:
        """Run a part that notes its name, and takes some seconds of the clock."""

        def work() -> None:
            self.ran.append(name)
            self.clock.now += seconds

        return asyncio.create_task(self.threads.run(flow, size, work))

    async def hold_all(self, flow: Flow) -> None:
        """Hold all threads; the one that `run_all` releases then runs the shorter parts one after the other."""
        assert THREADS == 2
        self.hold(flow, LONG)
        self.hold(flow, SHORT)
        await asyncio.sleep(0)

    async def run_all(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        await asyncio.sleep(0)
        self.held[-1].set()
        await done(tasks)

    def release(self) -> None:
        for event in self.held:
            event.set()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.release()
    made.threads.stop()


async def done(tasks: Sequence["asyncio.Task[None]"]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


async def test_a_long_text_leaves_a_thread_to_shorter_ones(bench):
    """Of two long texts one waits, and shorter texts of any tenant run meanwhile."""
    held = [bench.hold(BULK, LONG) for _ in range(THREADS)]
    second = bench.run("second long", APP, LONG)
    await done([bench.run("short", APP), bench.run("bulk", BULK)])
    assert ["short", "bulk"] == bench.ran
    bench.release()
    await done([second, *held])


async def test_all_threads_take_shorter_texts(bench):
    """A tenant that is alone is not held back."""
    running = threading.Barrier(THREADS)
    parts = [bench.threads.run(BULK, SHORT, lambda: running.wait(WAIT_S)) for _ in range(THREADS)]
    assert {*range(THREADS)} == {*await asyncio.wait_for(asyncio.gather(*parts), WAIT_S)}


async def test_interactive_texts_go_before_bulk_that_came_first(bench):
    """However much bulk waits."""
    await bench.hold_all(BULK)
    tasks = [bench.run("bulk", BULK) for _ in range(20)]
    await asyncio.sleep(0)
    tasks += [bench.run("app", APP) for _ in range(3)]
    await bench.run_all(tasks)
    assert ["app"] * 3 == bench.ran[:3]


@pytest.mark.parametrize("few", [Flow("m@1", 0, "few"), Flow("other@1", 0, "many")])
async def test_flows_take_turns(bench, few):
    """A tenant with few texts does not wait for all texts of one with many; nor does another of its models."""
    many = Flow("m@1", 0, "many")
    await bench.hold_all(many)
    tasks = [bench.run("many", many) for _ in range(20)]
    await asyncio.sleep(0)
    tasks += [bench.run("few", few) for _ in range(3)]
    await bench.run_all(tasks)
    assert 3 == bench.ran[:6].count("few")


async def test_a_tenant_pays_for_what_its_texts_took(bench):
    """Of texts of one size, those that take ten times as long get a tenth of the turns."""
    slow, fast = Flow("m@1", 0, "slow"), Flow("m@1", 0, "fast")
    await bench.hold_all(BULK)
    tasks = [bench.run("slow", slow, seconds=0.1) for _ in range(40)]
    tasks += [bench.run("fast", fast, seconds=0.01) for _ in range(40)]
    await bench.run_all(tasks)
    assert bench.ran[:30].count("slow") <= 6


async def test_a_part_that_is_cancelled_never_runs(bench):
    """And nothing is counted as waiting when all have ended."""
    held = [bench.hold(BULK, SHORT) for _ in range(THREADS)]
    gone, stays = bench.run("gone", APP), bench.run("stays", BULK)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    bench.release()
    await done([stays])
    await asyncio.gather(*held)
    assert ["stays"] == bench.ran
    assert {} == bench.threads.waiting


async def test_parts_that_wait_are_cancelled_at_the_end(bench):
    """The parts that run end, and no thread begins with another."""
    held = [bench.hold(BULK, SHORT) for _ in range(THREADS)]
    waiting = bench.run("late", APP)
    await asyncio.sleep(0)
    bench.threads.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    bench.release()
    await done(held)
    assert [] == bench.ran


async def test_an_error_is_its_part_s_alone(bench):
    """The thread goes on with the next."""

    def fail():
        raise ValueError("broken")

    for _ in range(2 * THREADS):
        with pytest.raises(ValueError, match="broken"):
            await bench.threads.run(APP, LONG, fail)
    await done([bench.run("next", APP, LONG)])
    assert {} == bench.threads.waiting


async def test_what_waits_is_expected_to_take_its_time(bench):
    """By characters and the measured speed; an interactive text waits for a ninth of the bulk's turns."""
    bench.hold(BULK, SHORT)
    await asyncio.sleep(0)
    assert 0.0 == bench.threads.wait_s(BULK, [SHORT])  # for one short text
    bench.hold(BULK, SHORT)
    with ExitStack() as stack:
        for _ in range(98):
            stack.enter_context(bench.threads.open(BULK, [SHORT]))
        await asyncio.sleep(0)
        all_s = 101 * SHORT / GUESS / THREADS
        assert bench.threads.wait_s(BULK, [SHORT]) == pytest.approx(all_s, rel=0.05)
        own_s = 9 / 8 * SHORT / GUESS / THREADS
        assert bench.threads.wait_s(APP, [SHORT]) == pytest.approx(own_s)
        assert bench.threads.wait_s(APP, [LONG, SHORT]) > LONG / GUESS


async def test_long_texts_are_expected_one_after_the_other(bench):
    """For one thread never takes them."""
    with ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(bench.threads.open(BULK, [LONG]))
        expected = 10 * LONG / GUESS / (THREADS - 1)
        assert bench.threads.wait_s(BULK, [LONG]) == pytest.approx(expected)
        # Of a request of many parts, only one part runs before a request of one part.
        stack.enter_context(bench.threads.open(APP, [LONG] * 100))
        few = bench.threads.wait_s(APP, [LONG])
        assert few < 3 * LONG / GUESS


async def test_the_speed_is_measured(bench):
    """A tokenizer that takes a hundred times as long as guessed is expected to."""
    await done([bench.run("slow", APP, seconds=100 * SHORT / GUESS) for _ in range(20)])
    with bench.threads.open(BULK, [SHORT] * 20):
        assert bench.threads.wait_s(APP, [SHORT]) > 50 * SHORT / GUESS / THREADS


async def test_a_model_that_has_left_is_forgotten(bench):
    """Unless another version with its name still has texts."""
    held = bench.hold(APP, SHORT)
    await done([bench.run("other", Flow("other@1"), LONG)])
    for model in ("m@1", "other@1"):
        bench.threads.forget(model)
    assert ["m@1"] == [*bench.threads.speeds]
    bench.release()
    await held
    bench.threads.forget("m@1")
    assert {} == bench.threads.speeds
