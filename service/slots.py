"""What happens to a batch in its thread: run, halve on failure, check, measure."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from service import errors
from service.encode import Window
from service.waiting import Entry, Outputs

Run = Callable[[int, str, Sequence[Window]], list[Outputs]]  # width in slots, bundle, entries
Result = Outputs | errors.InferenceFailed


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
