"""The order in which the service ends: one machine of stages, for the main process and for each HTTP process.

    STARTING -> RUNNING -> LEAVING -> DRAINING -> HURRYING -> STOPPED

| stage | begins with | readiness | listeners | requests |
|---|---|---|---|---|
| STARTING | the process | 503 | bound, and closed to clients | none |
| RUNNING | the log line "serving" | 200 | open | served |
| LEAVING | SIGTERM or SIGQUIT | 503 | open | served |
| DRAINING | the end of `drain_delay_s`; SIGINT; a signal while LEAVING | 503 | closed after the connections in \
their queues are accepted | the accepted ones are completed, and their connections closed, within `drain_s` |
| HURRYING | SIGTERM or SIGQUIT while DRAINING | 503 | closed | not waited for |
| STOPPED | SIGINT while DRAINING; a signal while STARTING; `drain_s` and `KILL_AFTER_S` after DRAINING | | | dropped |

A stage may be skipped, and never returns. LEAVING is skipped without `drain_delay_s`. The main process sends LEAVING,
DRAINING and HURRYING to its HTTP processes, and an HTTP process drains when the main process is gone. When the last
HTTP process has ended, the main process closes the channel of the inference process, which then ends. In STOPPED, the
main process kills its children. While DRAINING, it restarts only a lost inference process, for the accepted requests.

The log has "leaving" and at last "stopped" from the main process, and "draining" from each HTTP process. The exit
status is 0, unless the service could not continue.
"""

import asyncio
import signal
from collections.abc import Callable
from enum import IntEnum, auto


class Stage(IntEnum):
    STARTING = auto()
    RUNNING = auto()
    LEAVING = auto()
    DRAINING = auto()
    HURRYING = auto()
    STOPPED = auto()


class Shutdown:
    """The stage of a process.

    delay_s: seconds of LEAVING
    entered: called with each new stage
    """

    def __init__(self, delay_s: float, entered: Callable[[Stage], None] = lambda _: None) -> None:
        self.stage = Stage.STARTING
        self.delay_s = delay_s
        self.entered = entered

    def advance(self, stage: Stage) -> None:
        """Enter a stage, unless it is already entered or skipped."""
        if stage > self.stage:
            self.stage = stage
            self.entered(stage)

    def receive_signal(self, number: int) -> None:
        """Enter the stage that follows a stop signal."""
        if self.stops_at(number):
            self.advance(Stage.STOPPED)
        elif self.stage >= Stage.DRAINING:
            self.advance(Stage.HURRYING)
        elif self.stage == Stage.RUNNING and self.delay_s and number != signal.SIGINT:
            asyncio.get_running_loop().call_later(self.delay_s, self.advance, Stage.DRAINING)
            self.advance(Stage.LEAVING)
        else:
            self.advance(Stage.DRAINING)

    def stops_at(self, number: int) -> bool:
        """Return whether a stop signal ends the process at once; may be called in any thread."""
        is_draining = self.stage >= Stage.DRAINING
        return self.stage == Stage.STARTING or (is_draining and number == signal.SIGINT)
