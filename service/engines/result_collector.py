"""The results of one request: an input is decoded as soon as the outcomes of all its windows have arrived."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeGuard, TypeVar

from service.core.encode import Cut, Window
from service.errors import QuartetError
from service.scheduling.entries import Entry, EntryOutcome, Outcome, Outputs

T = TypeVar("T")
C = TypeVar("C", bound=Cut)
# Decodes one input from its index, its windows, and the outputs of each window by head.
Decode = Callable[[int, C, list[Outputs]], T]
# Decodes several inputs of one window each from their outputs by head, `[k, ...]`.
DecodeRows = Callable[[Outputs], Sequence[T]]
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
    entries: of all windows, each with the indices of its inputs; those of one input are in the order of its windows
    errors: of the inputs that failed; the collector adds to it where `isolate_errors` is set
    isolate_errors: a failed input has no result; otherwise the first error fails the request
    """

    def __init__(
        self,
        encoded: Sequence[C | None],
        entries: Mapping[Entry, Sequence[int]],
        errors: Errors,
        isolate_errors: bool,
        decode_one: Decode[C, T],
        decode_rows: DecodeRows[T] | None,
        on_result: OnResult[T] | None,
    ) -> None:
        self._encoded = encoded
        self._errors = errors
        self._isolate_errors = isolate_errors
        self._decode_one = decode_one
        self._decode_rows = decode_rows
        self._on_result = on_result
        self._inputs = entries
        self._outputs: dict[Entry, Outputs] = {}
        self._windows: dict[int, list[Entry]] = {}  # the entries of each input of several windows
        for entry, inputs in entries.items():
            if len(windows(encoded[inputs[0]])) > 1:
                self._windows.setdefault(inputs[0], []).append(entry)
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

    def add(self, entry: Entry, outcome: EntryOutcome) -> list[CompleteInput[C]]:
        """Add an entry's outcome; return the inputs that it completes."""
        complete = []
        for row, index in enumerate(self._inputs[entry]):
            item = self._encoded[index]
            if item is None or index in self._errors or self._request_error is not None:
                continue
            if isinstance(outcome, QuartetError):
                self._fail(index, outcome)
            elif row in outcome.failed:
                self._fail(index, outcome.failed[row])
            elif entry.window.lengths:
                outputs = {name: rows[row] for name, rows in outcome.outputs.items()}
                complete.append(CompleteInput(index, item, [outputs]))
            else:
                complete += self._add_window(index, item, entry, outcome.outputs)
        return complete

    def _add_window(
        self, index: int, item: C, entry: Entry, outputs: Outputs
    ) -> Iterator[CompleteInput[C]]:
        """Add the outputs of one window; yield the input if it was the last one."""
        self._outputs[entry] = outputs
        own = self._windows.get(index, [entry])
        if all(other in self._outputs for other in own):
            yield CompleteInput(index, item, [self._outputs.pop(other) for other in own])

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
            began = time.perf_counter()
            if self._decode_rows and self._is_whole(outcome, entry):
                results = self._decode_rows(outcome.outputs)
                self._results.update(zip(self._inputs[entry], results, strict=True))
                self.decode_s += time.perf_counter() - began
                continue
            for complete in self.add(entry, outcome):
                self.finish(complete, self.decode(complete), began)
                began = time.perf_counter()

    def _is_whole(self, outcome: EntryOutcome, entry: Entry) -> TypeGuard[Outcome]:
        """Return whether an entry has several inputs, and all have outputs."""
        if self._request_error is not None or isinstance(outcome, QuartetError):
            return False
        return bool(entry.window.lengths) and not outcome.failed

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
