"""The results of one request: an input is decoded as soon as the outcomes of all its windows have arrived."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from service.core.encode import Cut, Window
from service.errors import QuartetError
from service.scheduling.entries import Entry, EntryOutcome, Outputs

T = TypeVar("T")
C = TypeVar("C", bound=Cut)
# Decodes one input from its index, its windows, and the outputs of each window by head.
Decode = Callable[[int, C, list[Outputs]], T]
# Called with an input's index and its result; None where the input failed.
OnResult = Callable[[int, T | None], None]
Errors = dict[int, QuartetError]  # by the input's index


class CompleteInput(NamedTuple, Generic[C]):
    """An input whose windows all have an output; `place`: its index in the request."""

    place: int
    item: C
    outputs: list[Outputs]


class ResultCollector(Generic[C, T]):
    """A collector of the outcomes of a request's entries, in any order, into one result per input.

    encoded: the inputs, in order; None for an input that could not be encoded, whose error is in `errors`
    entries: of all windows, in the order of the inputs
    errors: of the inputs that failed; the collector adds to it where `isolate_errors` is set
    isolate_errors: a failed input has no result; otherwise the first error fails the request
    """

    def __init__(
        self,
        encoded: Sequence[C | None],
        entries: Iterable[Entry],
        errors: Errors,
        isolate_errors: bool,
        decode_one: Decode[C, T],
        on_result: OnResult[T] | None,
    ) -> None:
        rest = iter(entries)
        self._encoded = encoded
        self._errors = errors
        self._isolate_errors = isolate_errors
        self._decode_one = decode_one
        self._on_result = on_result
        self._entries = [[next(rest) for _ in windows(item)] for item in encoded]
        self._input = {entry: index for index, own in enumerate(self._entries) for entry in own}
        self._outputs: dict[Entry, Outputs] = {}
        self._results: dict[int, T] = {}
        self._request_error: QuartetError | None = None
        self.decode_s = 0.0
        for index in errors:
            self._report(index, None)

    def results(self) -> list[T | None]:
        """Return the results in the order of the inputs. Raises the error that fails the request."""
        if self._request_error is not None:
            raise self._request_error
        return [self._results.get(index) for index in range(len(self._encoded))]

    def add(self, entry: Entry, outcome: EntryOutcome) -> CompleteInput[C] | None:
        """Add an entry's outcome; return the input that it completes, or None."""
        index = self._input[entry]
        item = self._encoded[index]
        if item is None or index in self._errors or self._request_error is not None:
            return None
        if isinstance(outcome, QuartetError):
            self._fail(index, outcome)
            return None
        self._outputs[entry] = outcome.outputs
        own = self._entries[index]
        if not all(other in self._outputs for other in own):
            return None
        return CompleteInput(index, item, [self._outputs.pop(other) for other in own])

    def decode(self, complete: CompleteInput[C]) -> T:
        """Decode an input; may run in any thread."""
        return self._decode_one(*complete)

    def finish(self, complete: CompleteInput[C], result: T, began: float) -> None:
        """Keep and report the result of an input whose decoding began at `began` (`time.perf_counter`)."""
        self._results[complete.place] = result
        self.decode_s += time.perf_counter() - began
        self._report(complete.place, result)

    def add_all(self, entries: Iterable[Entry], outcomes: Iterable[EntryOutcome]) -> None:
        """Add the outcomes of all entries, and decode each input that they complete."""
        for entry, outcome in zip(entries, outcomes, strict=True):
            if complete := self.add(entry, outcome):
                began = time.perf_counter()
                self.finish(complete, self.decode(complete), began)

    def _fail(self, index: int, error: QuartetError) -> None:
        if not self._isolate_errors:
            self._request_error = error
            return
        self._errors[index] = error
        self._report(index, None)

    def _report(self, index: int, result: T | None) -> None:
        if self._on_result is not None:
            self._on_result(index, result)


def windows(item: Cut | None) -> Sequence[Window]:
    """Return an input's windows; an input that could not be encoded (None) has no windows."""
    return () if item is None else item.windows
