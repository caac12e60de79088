"""Threads of slots: results, errors, what they keep, and their end."""

import asyncio
import subprocess
import sys
import threading
import weakref

import pytest

from service.scheduling.executor import Ended, Job, Threads

WAIT_S = 60
# A program that ends while a job runs, after the free thread was stopped.
PROGRAM = """
import asyncio, threading, time
from service.scheduling.executor import Job, Threads

async def main():
    threads = Threads(2, lambda call: call())
    begun = threading.Event()
    def work():
        begun.set()
        time.sleep(0.3)
        print("the job has ended", flush=True)
    threads.run(Job(1, work, lambda: None, lambda end: None))
    begun.wait()
    threads.stop()

asyncio.run(main())
print("the program ends", flush=True)
"""


@pytest.fixture
async def threads():
    threads = Threads(1, lambda call: call())
    yield threads
    threads.stop()


async def run(threads, work):
    """Run a job, and return its end."""
    future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    threads.run(Job(1, work, lambda: None, future.set_result))
    return await asyncio.wait_for(future, WAIT_S)


async def test_a_thread_goes_on_after_an_error(threads):
    """An error of a job is its end, and the thread runs the next job."""
    error = SystemExit("a job must not end its thread")

    def fail():
        raise error

    assert error is (await run(threads, fail)).error
    end = await run(threads, threading.get_ident)
    assert (None, 1) == (end.error, threads.idle)
    assert threading.get_ident() != end.value


async def test_an_idle_thread_keeps_nothing_of_its_last_job(threads):
    """The inputs and outputs of a batch are freed, even if no other batch follows."""

    class Large:
        pass

    end = await run(threads, Large)
    value = weakref.ref(end.value)
    del end
    async with asyncio.timeout(WAIT_S):
        while value() is not None:
            await asyncio.sleep(0.001)


def test_the_interpreter_waits_for_a_job():
    """A native library must not run while the interpreter's memory is freed."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ["the program ends", "the job has ended"] == done.stdout.split("\n")[:2], done.stderr
    assert done.returncode == 0
