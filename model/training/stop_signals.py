"""Signals that end a training run after the current step: SIGINT (Ctrl-C) and SIGTERM."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

HANDLED = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"stopping after this step, when the run is saved; another signal stops at once\n"


class StoppedRun(SystemExit):
    """The end of a run that a signal stopped and that was saved; the exit status is 128 + the signal's number."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class StopSignals:
    """A context that records the first SIGINT or SIGTERM in `received` (0: none); the second ends the process."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._receive) for each in HANDLED}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def received_by_any(self, total: Callable[[dict[str, float]], dict[str, float]]) -> int:
        """Return a signal that some process of a group has received, or 0. total: adds up values over processes"""
        counts = total({str(each): float(self.received == each) for each in HANDLED})
        return next((each for each in HANDLED if counts[str(each)]), 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        os.write(2, NOTICE)  # print is not reentrant
        self._restore()  # a second signal has its usual effect

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
