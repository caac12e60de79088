"""A writer of log lines to a file descriptor that may be full, closed, or a pipe that no process reads."""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from itertools import accumulate

KEPT_BYTES = 1 << 20  # largest total size of the lines that wait
# The largest size of one write, so that lines of several processes do not mix in a pipe.
ATOMIC_BYTES = select.PIPE_BUF
GATHER_S = 0.05  # time after a write in which lines are collected for the next, because each wake-up costs a request
CLOSE_S = 1.0


class LogWriter:
    """A stream that writes lines in a thread. `write` neither waits nor raises.

    A line is lost if more than KEPT_BYTES would wait, or if the descriptor refuses it. `lost` counts these lines.

    recovered: called in the thread when a line is written again, with the number of lines lost since its last call
    """

    def __init__(self, descriptor: int, recovered: Callable[[int], None]) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._recovered = recovered
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._size = 0  # bytes that wait or are being written
        self._unreported = 0
        self._torn = False  # the last write ended within a line
        self._idle = False
        self._closing = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> None:
        line = text.encode(errors="backslashreplace")
        with self._changed:
            if self._size + len(line) > KEPT_BYTES:
                self._lose(1)
                return
            self._lines.append(line)
            self._size += len(line)
            if self._idle:
                self._changed.notify_all()

    def flush(self) -> None:
        """Return at once. A caller that has to wait calls `close`."""

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until all lines are written, `timeout_s` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._size, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle = True
                self._changed.wait_for(lambda: self._lines)
                self._idle = False
            while lines := self._take():
                self._write(lines)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, GATHER_S)

    def _take(self) -> list[bytes]:
        """Return the next lines that fit into one write, at least one if there is any."""
        taken: list[bytes] = []
        size = 0
        with self._changed:
            while self._lines and (not taken or size + len(self._lines[0]) <= ATOMIC_BYTES):
                taken.append(self._lines.popleft())
                size += len(taken[-1])
        return taken

    def _write(self, lines: list[bytes]) -> None:
        size, written = sum(map(len, lines)), 0
        parts = [b"\n" * self._torn, *lines]
        ends = [*accumulate(map(len, parts))]
        data = memoryview(b"".join(parts))
        try:
            while written < len(data):
                written += self._write_some(data[written:])
        except OSError:
            pass  # the lines are counted below
        if written:
            self._torn = written not in ends
        whole = sum(end <= written for end in ends[1:])
        with self._changed:
            self._lose(len(lines) - whole)
            self._size -= size
            keeps_up = self._size < KEPT_BYTES // 2  # otherwise the report could be lost, too
            recovered = self._unreported if whole and keeps_up else 0
            self._unreported -= recovered
            self._changed.notify_all()
        if recovered:
            self._recovered(recovered)

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another process with the same descriptor made it non-blocking
            select.select([], [self._descriptor], [], 1.0)
            return 0

    def _lose(self, lines: int) -> None:
        self.lost += lines
        self._unreported += lines
