"""Liveness: how a process, a batch or a bundle that no longer works is detected, and after how long.

| what | sign of life | watched by | limit | then |
|---|---|---|---|---|
| child process | a heartbeat every `HEARTBEAT_S` | main process | the setting `hang_s` | kill it, start it again |
| inference process | its load every `LOAD_REPORT_S` | each HTTP process | `LOAD_SILENCE_S` | not ready |
| channel between two children | it is open | HTTP process | `CHANNEL_MISSING_S` | the main process opens another |
| batch | it ends | its own process | `hang_limit_s` | not ready, and the process ends |
| bundle | a batch that succeeds, or a self-test every `SELF_TEST_S` | its own process | one failure | not ready |
| bundle | the same | its own process | `SELF_TEST_FAILURES` in a row | the process ends |

The service reports that it is not ready within a second, so each limit for readiness is below a second.
"""

import asyncio

TICK_S = 0.1  # tick of a `StallClock`
HEARTBEAT_S = 0.25
LOAD_REPORT_S = 0.1
LOAD_SILENCE_S = 0.75
CHANNEL_MISSING_S = 1.0  # a missing channel is mostly being opened already
# Before a child requests a descriptor again, after the channel had no room for it.
DESCRIPTOR_MISSING_S = 0.25
SELF_TEST_S = 0.75
SELF_TEST_POLL_S = 0.1
SELF_TEST_FAILURES = 3
DEVICE_POLL_S = 0.25  # between checks of the device where there is one process
HANG_FACTOR = 20  # times the expected duration of a batch

RESTART_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # before a child that keeps ending starts again
FAILED_STARTS = 10  # in a row: then the service ends, after more than half a minute
SETTLED_S = 30.0  # the end of a child that has served for longer does not count as a failed start
KILL_AFTER_S = 2.0  # beyond the time for draining
CHANNEL_REPEATS = 20  # of a descriptor that did not arrive, in a row, about one a second
CHANNEL_ARRIVED_S = 5.0  # without a report that it is missing


class StallClock:
    """A clock of the seconds in which this process could run, by ticks of its event loop.

    A time in which the process is stopped, gets no core, or the machine sleeps counts as one tick, independent of its
    length. So this process is not the cause of a silence that the clock measures.
    """

    def __init__(self, tick_s: float) -> None:
        self.seconds = 0.0
        self.tick_s = tick_s

    async def tick(self) -> None:
        """Wait for the next tick and count it; exactly one task calls this, in a loop."""
        await asyncio.sleep(self.tick_s)
        self.seconds += self.tick_s


class LastSign:
    """The time of the last sign of life of a process, by a stall clock."""

    def __init__(self, clock: StallClock) -> None:
        self._clock = clock
        self._at = clock.seconds

    def renew(self) -> None:
        self._at = self._clock.seconds

    @property
    def silent_s(self) -> float:
        return self._clock.seconds - self._at


def hang_limit_s(hang_s: float, expected_s: float) -> float:
    """Return the seconds that a batch may run.

    hang_s: the setting
    expected_s: seconds that the cost model predicts for the batch
    """
    return max(hang_s, HANG_FACTOR * expected_s)
