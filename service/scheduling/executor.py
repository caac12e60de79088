"""The threads of a device's slots, and their work on a batch: run it, halve it on failure, check it, measure it."""

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from service import errors
from service.core.encode import Window
from service.scheduling.entries import Entry, Heads, Outputs

# Called with the width in slots, the bundle, the entries' windows, and the heads to compute.
RunBatch = Callable[[int, str, Sequence[Window], Heads], list[Outputs]]
EntryResult = Outputs | errors.InferenceFailed


class Ended:
    """The end of a job: its value, or the error that it raised."""

    __slots__ = ("error", "value")

    def __init__(self, run: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        try:
            self.value = run()
        except BaseException as error:  # the thread must go on
            self.error = error


@dataclass(slots=True, eq=False)
class Job:
    """Work for one thread."""

    width: int  # the slots that it takes
    run: Callable[[], Any]  # called in the thread
    started: Callable[[], None]  # called in the event loop when the thread begins with the job
    ended: Callable[[Ended], None]  # called in the event loop with the result


class SlotThread(threading.Thread):
    """A thread that calls a function with each of its jobs, and with the event loop that gets the job's end."""

    def __init__(self, work: Callable[["SlotThread"], None], name: str) -> None:
        super().__init__(target=work, args=(self,), name=name, daemon=True)
        self.jobs: SimpleQueue[tuple[asyncio.AbstractEventLoop, Job | None] | None] = SimpleQueue()

    def start(self) -> None:
        super().start()
        atexit.register(self.end)  # the interpreter must not exit during a job

    def end(self, wait: bool = True) -> None:
        """End after the job that runs."""
        self.jobs.put(None)
        if wait and self.is_alive():
            self.join()
            atexit.unregister(self.end)


class Threads:
    """One thread for each slot.

    A thread that has ended a job begins with the prefetched job, if there is one, before the event loop handles the end
    of its first job. So the thread does not wait for the planner. Everything else happens in the event loop, in calls
    that `post` makes. A `ThreadPoolExecutor` takes longer for each job, because its futures have locks.

    name: the beginning of the threads' names
    idle: slots that run nothing
    """

    def __init__(
        self, slots: int, post: Callable[[Callable[[], None]], None], name: str = "replica"
    ) -> None:
        self.idle = slots
        self._post = post
        self._all = [SlotThread(self._work, f"{name}-{number}") for number in range(slots)]
        self._free = [*self._all]  # the thread that ran last goes first: its data is in the caches
        self._next: deque[Job] = deque()  # the prefetched job

    def start(self) -> None:
        """Start all threads, which otherwise start with their first job. Raises RuntimeError if one cannot."""
        for thread in self._all:
            thread.start()

    def run(self, job: Job) -> None:
        """Begin with a job; requires enough idle slots for its width."""
        thread = self._free.pop()
        if thread.ident is None:
            thread.start()
        self._begin(job)
        thread.jobs.put((asyncio.get_running_loop(), job))

    def prefetch(self, job: Job) -> None:
        """Let the thread that ends first begin with a job; requires that no slot is idle."""
        self._next.append(job)

    def cancel_prefetch(self) -> bool:
        """Cancel the prefetched job; False if a thread has begun with it, which `started` will report."""
        with suppress(IndexError):
            self._next.pop()
            return True
        return False

    def stop(self) -> None:
        """End the free threads; a busy thread ends after its job, at the latest before the interpreter exits."""
        self.cancel_prefetch()
        for thread in self._all:
            thread.end(wait=thread in self._free)

    def _begin(self, job: Job) -> None:
        self.idle -= job.width
        job.started()

    def _work(self, thread: SlotThread) -> None:
        """Run jobs, and pass their ends to the event loop; called in the thread."""
        while (given := thread.jobs.get()) is not None:
            loop, job = given
            while job is not None:
                job = self._run_job(thread, loop, job)
            del given, loop

    def _run_job(self, thread: SlotThread, loop: asyncio.AbstractEventLoop, job: Job) -> Job | None:
        """Run a job, and return the prefetched job, if there is one."""
        ended = Ended(job.run)
        following = None
        with suppress(IndexError):
            following = self._next.pop()
        with suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(
                self._post, partial(self._ended, thread, job, ended, following)
            )
        return following

    def _ended(self, thread: SlotThread, job: Job, ended: Ended, following: Job | None) -> None:
        self.idle += job.width
        if following is None:
            self._free.append(thread)
        else:
            self._begin(following)
        job.ended(ended)


@dataclass(slots=True, eq=False)
class Running:
    """A batch in its thread; the device's watcher counts its `age_s`."""

    bundle: str
    size: int
    tokens: int
    expected_s: float
    age_s: float = 0.0


@dataclass(slots=True, eq=False)
class Probe:
    """A window that a self-test computes."""

    bundle: str
    window: Window
    future: asyncio.Future[Outputs]

    def settle(self, ended: Ended) -> None:
        if self.future.done():
            return
        if ended.error is not None:
            self.future.set_exception(ended.error)
        else:
            (outputs,) = ended.value
            self.future.set_result(outputs)


@dataclass(slots=True)
class BatchStats:
    """The statistics of a batch that ran, for metrics. masks: mask tokens whose logits were computed"""

    bundle: str
    size: int
    tokens: int
    longest: int
    queue_s: tuple[float, ...]  # of each entry, from its arrival
    inference_s: float
    failed: Mapping[Entry, errors.InferenceFailed] = field(default_factory=dict)
    masks: int = 0
    batch: Sequence[Entry] = ()

    @property
    def slots(self) -> int:
        """B * S, the slots of the padded batch."""
        return self.size * self.longest

    @property
    def padding_ratio(self) -> float:
        """Padded slots per real token; 1.0 is no padding."""
        return self.slots / self.tokens


def work(
    run: RunBatch, width: int, batch: Sequence[Entry], clock: Callable[[], float]
) -> tuple[list[EntryResult], BatchStats]:
    """Run a batch; return each entry's result, and the batch's statistics."""
    began = clock()
    results = attempt(run, width, batch)
    lengths = [entry.tokens for entry in batch]
    stats = BatchStats(
        bundle=batch[0].bundle,
        size=len(batch),
        tokens=sum(lengths),
        longest=max(lengths),
        queue_s=tuple(began - entry.arrival for entry in batch),
        inference_s=clock() - began,
        failed={
            entry: result
            for entry, result in zip(batch, results, strict=True)
            if isinstance(result, errors.InferenceFailed)
        },
        masks=sum(entry.masks for entry in batch),
        batch=batch,
    )
    return results, stats


def attempt(run: RunBatch, width: int, batch: Sequence[Entry]) -> list[EntryResult]:
    """Run a batch; if it raises, run its halves, so that one bad input fails alone."""
    try:
        outputs = run(width, batch[0].bundle, [entry.window for entry in batch], all_heads(batch))
    except Exception as error:  # any error of one input must not fail the others
        if len(batch) == 1:
            failure = errors.InferenceFailed("the model failed on this input")
            failure.__cause__ = error
            return [failure]
        half = len(batch) // 2
        return attempt(run, width, batch[:half]) + attempt(run, width, batch[half:])
    if len(outputs) != len(batch):
        message = f"our bug: a batch of {len(batch)} gave {len(outputs)} results"
        return [errors.InferenceFailed(message) for _ in batch]
    return [_own(entry, result) for entry, result in zip(batch, outputs, strict=True)]


def all_heads(batch: Sequence[Entry]) -> Heads:
    """Return the heads that the entries of a batch need together."""
    wanted = {entry.heads for entry in batch}
    return () if () in wanted else tuple({head for heads in wanted for head in heads})


def _own(entry: Entry, outputs: Outputs) -> EntryResult:
    """Return the outputs of the entry's heads, or an error where they are not finite."""
    own = {}
    for head in entry.heads or outputs:
        if head not in outputs:
            return errors.InferenceFailed(f"our bug: the graph has no output {head!r}")
        own[head] = outputs[head]
        if not np.isfinite(own[head]).all():
            return errors.InferenceFailed("the model's result for this input is not finite")
    return own
