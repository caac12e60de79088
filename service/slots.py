"""The threads of a device's slots, and what happens to a batch there: run, halve on failure, check, measure."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from service import errors
from service.encode import Window
from service.waiting import Entry, Outputs

Run = Callable[[int, str, Sequence[Window]], list[Outputs]]  # width in slots, bundle, entries
Result = Outputs | errors.InferenceFailed


@dataclass(slots=True, eq=False)
class Job:
    """What a thread is to do, on so many slots: `run` is called there, and of that `started` and `ended` are told."""

    width: int
    run: Callable[[], Any]
    started: Callable[[], None]
    ended: Callable[[Future[Any]], None]


class Threads:
    """One for each slot. All but what they run, and the taking of what is set out, happens where `post` calls.

    A thread that has ended a job goes on with the one that is set out, if there is any, and only then is it told of:
    so it need not wait for who plans. `idle`: the slots that nothing runs on
    """

    def __init__(self, slots: int, post: Callable[[Callable[[], None]], None]) -> None:
        self.idle = slots
        self._post = post
        self._all = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(slots)]
        self._free = [*self._all]  # who ran last goes first: its memory is in the caches
        self._next: deque[Job] = deque()  # the one that is set out

    def start(self) -> None:
        for thread in self._all:
            thread.submit(int)  # one that cannot be had is known now

    def run(self, job: Job) -> None:
        """Begin with a job for which there are idle slots."""
        thread = self._free.pop()
        self._begin(job)
        thread.submit(self._work, asyncio.get_running_loop(), thread, job)

    def set_out(self, job: Job) -> None:
        """Let whoever ends first go on with it, while nothing is idle."""
        self._next.append(job)

    def take_back(self) -> bool:
        """Nobody is to go on with what is set out; False when somebody has, of which is told soon."""
        with suppress(IndexError):
            self._next.pop()
            return True
        return False

    def stop(self) -> None:
        """End those that are free; one that is still busy ends with its job."""
        self.take_back()
        for thread in self._all:
            thread.shutdown(wait=thread in self._free, cancel_futures=True)

    def _begin(self, job: Job) -> None:
        self.idle -= job.width
        job.started()

    def _work(
        self, loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor, job: Job | None
    ) -> None:
        while job is not None:
            ran: Future[Any] = Future()
            try:
                ran.set_result(job.run())
            except BaseException as error:
                ran.set_exception(error)
            following = None
            with suppress(IndexError):
                following = self._next.pop()
            told = partial(self._ended, thread, job, ran, following)
            with suppress(RuntimeError):  # the loop is closed: it had not waited for us
                loop.call_soon_threadsafe(self._post, told)
            del ran, told  # what came of it is not kept while the next one runs
            job = following

    def _ended(
        self, thread: ThreadPoolExecutor, job: Job, ran: Future[Any], following: Job | None
    ) -> None:
        self.idle += job.width
        if following is None:
            self._free.append(thread)
        else:
            self._begin(following)
        job.ended(ran)


@dataclass(slots=True, eq=False)
class Running:
    """A batch in its thread, which it is expected to leave after so many seconds; its age is for others to count."""

    bundle: str
    size: int
    tokens: int
    expected_s: float
    age_s: float = 0.0


@dataclass(slots=True, eq=False)
class Probe:
    """A window that is computed for nobody but who asks how the bundle is."""

    bundle: str
    window: Window
    future: asyncio.Future[Outputs]

    def settle(self, ran: Future[list[Outputs]]) -> None:
        if self.future.done():
            return
        try:
            (outputs,) = ran.result()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(outputs)


@dataclass(frozen=True, slots=True)
class BatchStats:
    """A batch that ran, for metrics."""

    bundle: str
    size: int
    tokens: int
    longest: int
    queue_s: tuple[float, ...]  # of each entry, from its arrival
    inference_s: float
    failed: Mapping[Entry, errors.InferenceFailed] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """B * S: what a padded batch would hold."""
        return self.size * self.longest

    @property
    def padding_ratio(self) -> float:
        """Padded slots per real token; 1.0 is no padding."""
        return self.slots / self.tokens


def work(
    run: Run, width: int, batch: Sequence[Entry], clock: Callable[[], float]
) -> tuple[list[Result], BatchStats]:
    """Run a batch and say what came of each entry, and what it took."""
    began = clock()
    results = attempt(run, width, batch)
    stats = BatchStats(
        bundle=batch[0].bundle,
        size=len(batch),
        tokens=sum(entry.tokens for entry in batch),
        longest=max(entry.tokens for entry in batch),
        queue_s=tuple(began - entry.arrival for entry in batch),
        inference_s=clock() - began,
        failed={
            entry: result
            for entry, result in zip(batch, results, strict=True)
            if isinstance(result, errors.InferenceFailed)
        },
    )
    return results, stats


def attempt(run: Run, width: int, batch: Sequence[Entry]) -> list[Result]:
    """Run a batch; when it raises, halve it, so that one bad input fails alone."""
    try:
        outputs = run(width, batch[0].bundle, [entry.window for entry in batch])
    except Exception as error:
        if len(batch) == 1:
            failure = errors.InferenceFailed("the model failed on this input")
            failure.__cause__ = error
            return [failure]
        half = len(batch) // 2
        return attempt(run, width, batch[:half]) + attempt(run, width, batch[half:])
    if len(outputs) != len(batch):
        said = f"our bug: a batch of {len(batch)} gave {len(outputs)} results"
        return [errors.InferenceFailed(said) for _ in batch]
    return [_own(entry, result) for entry, result in zip(batch, outputs, strict=True)]


def _own(entry: Entry, outputs: Outputs) -> Result:
    """The outputs that the entry asked for, if they are numbers."""
    if entry.head is not None:
        if entry.head not in outputs:
            return errors.InferenceFailed(f"our bug: the graph has no output {entry.head!r}")
        outputs = {entry.head: outputs[entry.head]}
    if all(np.isfinite(rows).all() for rows in outputs.values()):
        return outputs
    return errors.InferenceFailed("the model's result for this input is not finite")
