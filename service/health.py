"""Liveness: how a process, a batch or a bundle that no longer works is noticed, and after how long.

| what | sign of life | watched by | limit | then |
|---|---|---|---|---|
| child process | a heartbeat every `HEARTBEAT_S` | main process | the setting `hang_s` | kill it, start it again |
| inference process | its load every `LOAD_REPORT_S` | each HTTP process | `LOAD_SILENCE_S` | not ready |
| channel between two children | it is open | HTTP process | `CHANNEL_MISSING_S` | the main process makes another |
| batch | it ends | its own process | `hang_limit_s` | not ready, and the process ends |
| bundle | a batch that succeeds, or a self-test every `SELF_TEST_S` | its own process | one failure | not ready |
| bundle | the same | its own process | `SELF_TEST_FAILURES` in a row | the process ends |

Readiness turns negative within a second, so each limit for it is below that.
"""

import asyncio

TICK_S = 0.1  # of the clocks below
HEARTBEAT_S = 0.25
LOAD_REPORT_S = 0.1
LOAD_SILENCE_S = 0.75
CHANNEL_MISSING_S = 1.0  # most of the time a channel is on its way
DESCRIPTOR_MISSING_S = (
    0.25  # before a child asks for a descriptor again: there was no room for it just now
)
SELF_TEST_S = 0.75
SELF_TEST_POLL_S = 0.1
SELF_TEST_FAILURES = 3
DEVICE_POLL_S = 0.25  # between checks of the device where there is one process
HANG_FACTOR = 20  # times the expected duration of a batch

RESTART_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # before a child that keeps ending starts again
FAILED_STARTS = 10  # in a row: then the service ends, after more than half a minute
SETTLED_S = 30.0  # a child that served for so long did not end because of its start
KILL_AFTER_S = 2.0  # beyond the time for draining
CHANNEL_REPEATS = 20  # of a descriptor that did not arrive, in a row, about one a second
CHANNEL_ARRIVED_S = 5.0  # without a report that it is missing


class StallClock:
    """Seconds in which this process could have noticed something, by ticks of its event loop.

    It stands still while the process is stopped, gets no core, or the machine sleeps: however long that takes, it
    counts as one tick. So a silence by this clock is not caused by this process.
    """

    def __init__(self, tick_s: float) -> None:
        self.seconds = 0.0
        self.tick_s = tick_s

    async def tick(self) -> None:
        """Wait for the next tick; one task does, again and again."""
        await asyncio.sleep(self.tick_s)
        self.seconds += self.tick_s


class LastSign:
    """The last sign of life of something, by a stall clock."""

    def __init__(self, clock: StallClock) -> None:
        self._clock = clock
        self._at = clock.seconds

    def renew(self) -> None:
        self._at = self._clock.seconds

    @property
    def silent_s(self) -> float:
        return self._clock.seconds - self._at


def hang_limit_s(hang_s: float, expected_s: float) -> float:
    """How long a batch may run; hang_s: the setting, expected_s: what the cost model expects of the batch."""
    return max(hang_s, HANG_FACTOR * expected_s)
