"""The threads of a device's slots, and their work on a batch: run it, halve it on failure, check it, measure it."""

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from service.core.encode import Window
from service.core.packing import divide
from service.errors import InferenceFailed, QuartetError
from service.scheduling.entries import Entry, EntryOutcome, Heads, Outcome, Outputs

# Called with the width in slots, the bundle, the entries' windows, and the heads to compute.
RunBatch = Callable[[int, str, Sequence[Window], Heads], list[Outputs]]
# The outputs of a window, or why it failed; a list for each of its several sequences.
Result = Outputs | InferenceFailed | list[Any]


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
    """The statistics of a batch that ran, for metrics.

    masks: mask tokens whose logits were computed
    failed: the sequences that failed, with their entries and errors
    """

    bundle: str
    size: int
    tokens: int
    longest: int
    queue_s: tuple[float, ...]  # of each sequence, from its arrival
    inference_s: float
    failed: Sequence[tuple[Entry, Window, QuartetError]] = ()
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
) -> tuple[list[EntryOutcome], BatchStats]:
    """Run a batch; return each entry's outcome, and the batch's statistics."""
    began = clock()
    windows = [entry.window for entry in batch]
    results = attempt(run, width, batch[0].bundle, windows, all_heads(batch))
    own = [_own(entry, result) for entry, result in zip(batch, results, strict=True)]
    stats = BatchStats(
        bundle=batch[0].bundle,
        size=sum(entry.size for entry in batch),
        tokens=sum(entry.tokens for entry in batch),
        longest=max(entry.longest for entry in batch),
        queue_s=tuple(began - entry.arrival for entry in batch for _ in range(entry.size)),
        inference_s=clock() - began,
        masks=sum(entry.masks for entry in batch),
        batch=batch,
    )
    figures = stats.inference_s, stats.size, stats.tokens, stats.padding_ratio
    outcomes: list[EntryOutcome] = []
    for entry, found in zip(batch, own, strict=True):
        if isinstance(found, InferenceFailed):
            outcomes.append(found)
            failed = dict.fromkeys(range(entry.size), found)
        else:
            outputs, failed = found
            outcomes.append(Outcome(outputs, began - entry.arrival, *figures, failed))
        if failed:
            windows = divide(entry.window) if entry.window.lengths else [entry.window]
            stats.failed = [*stats.failed, *((entry, windows[i], e) for i, e in failed.items())]
    return outcomes, stats


def attempt(
    run: RunBatch, width: int, bundle: str, windows: Sequence[Window], heads: Heads
) -> list[Result]:
    """Run a batch; if it raises, run its halves, so that one bad input fails alone."""
    try:
        outputs = run(width, bundle, windows, heads)
    except Exception as error:  # any error of one input must not fail the others
        run_part = partial(attempt, run, width, bundle, heads=heads)
        if len(windows) > 1:
            half = len(windows) // 2
            return run_part(windows[:half]) + run_part(windows[half:])
        if windows[0].lengths:
            return [run_part(divide(windows[0]))]
        failure = InferenceFailed("the model failed on this input")
        failure.__cause__ = error
        return [failure]
    if len(outputs) != len(windows):
        message = f"our bug: a batch of {len(windows)} gave {len(outputs)} results"
        return [InferenceFailed(message) for _ in windows]
    return [*outputs]


def all_heads(batch: Sequence[Entry]) -> Heads:
    """Return the heads that the entries of a batch need together."""
    wanted = {entry.heads for entry in batch}
    return () if () in wanted else tuple({head for heads in wanted for head in heads})


def _own(
    entry: Entry, result: Result
) -> tuple[Outputs, dict[int, InferenceFailed]] | InferenceFailed:
    """Return the outputs of the entry's heads, with the errors of single sequences; an error if all failed."""
    if not isinstance(result, list):
        checked = _check(entry.heads, result)
        if not isinstance(checked, InferenceFailed):
            return checked, {}
        if not entry.window.lengths or isinstance(result, InferenceFailed):
            return checked
        names = entry.heads or result
        result = [{name: result[name][row] for name in names} for row in range(entry.size)]
    each = [_check(entry.heads, one) for one in result]
    failed = {row: one for row, one in enumerate(each) if isinstance(one, InferenceFailed)}
    good = next((one for one in each if not isinstance(one, InferenceFailed)), None)
    if good is None:
        return failed[0]
    zeros = {name: np.zeros_like(rows) for name, rows in good.items()}
    rows = [zeros if isinstance(one, InferenceFailed) else one for one in each]
    return {name: np.stack([own[name] for own in rows]) for name in good}, failed


def _check(heads: Heads, result: Outputs | InferenceFailed) -> Outputs | InferenceFailed:
    """Return the outputs of these heads, or an error where they are not finite."""
    if isinstance(result, InferenceFailed):
        return result
    own = {}
    for head in heads or result:
        if head not in result:
            return InferenceFailed(f"our bug: the graph has no output {head!r}")
        own[head] = result[head]
        if not np.isfinite(own[head]).all():
            return InferenceFailed("the model's result for this input is not finite")
    return own
