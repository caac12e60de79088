"""The main process of a service with separate HTTP and inference processes: it starts, connects and ends them.

    main ── inference, one for each device: the bundles' sessions, a batcher  (service/processes/inference_process.py)
       └─── HTTP, one or several: parse, tokenize, decode, on one listener    (service/processes/http_process.py)

Both begin in service/processes/child_main.py. Each HTTP process has a socket to each inference process, and so has the
first inference process to the others (service/processes/channel.py). Each child has one to the main process
(service/processes/control_channel.py).
A child that ends is restarted and connected again. HTTP processes then send their unanswered requests to a new
inference process. A child without a heartbeat is killed, and then restarted. If a child reports that it cannot start
before any child of its role has served, the service ends.
"""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from pydantic import SecretStr

from service import liveness
from service.core.device_places import Place
from service.engines.memory_limit import explain_kill, oom_kills
from service.keys import Keys, dump_keys
from service.liveness import LastSign, StallClock
from service.processes import child_process
from service.processes.child_process import ChildProcess
from service.processes.control_channel import (
    KEYS,
    MISSING,
    PEER,
    STAGES,
    ChildControl,
    Report,
    channel_to,
)
from service.processes.key_file_watcher import KeyFiles
from service.processes.process_signals import reap_orphans, stop_signals
from service.settings import Settings
from service.settings_sources import CANNOT_GO_ON, KeySource
from service.shutdown import Shutdown, Stage

log = structlog.get_logger()

CANNOT_START = 3


@dataclass(eq=False)
class Child:
    """A child process."""

    role: str
    process: ChildProcess
    control: ChildControl
    last_report: LastSign  # time of its last report
    last_repeat: LastSign  # time at which a descriptor was last sent to it again
    serves: float | None = None  # time since which it serves, by `time.monotonic`
    killed: bool = False  # by the main process
    oom_kills: Mapping[Path, int] = field(default_factory=oom_kills)  # at its start
    repeated: int = 0  # how often in a row a descriptor was sent to it again
    device: int = 0  # the number of its device; 0 for an HTTP process

    def talks_to(self, other: "Child") -> bool:
        """Whether there is a channel between the two. The first device's process also leads the other ones."""
        return self.role != other.role or (
            self.role == "inference" and 0 in (self.device, other.device)
        )


class Processes:
    """The inference process of each device and the HTTP processes, which are kept running until the service ends.

    source: where API keys are reloaded from
    devices: the first one's process leads the others
    """

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        source: KeySource | None = None,
        devices: Sequence[Place] = (Place("cpu"),),
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._source = source
        self._listeners = listeners
        self._children: set[Child] = set()
        self._stall_clock = StallClock(liveness.HEARTBEAT_S)
        # State that an inference process leaves to its successor.
        self._resume: dict[str, object] | None = None
        # Roles and devices of which at least one child has served.
        self._served: set[tuple[str, int]] = set()
        self._shutdown = Shutdown(settings.drain_delay_s, self._enter)
        self._restarts_end = asyncio.Event()  # interrupts the pauses before restarts
        self._status = 0

    async def run(self) -> int:
        """Serve until a stop signal. Returns the exit status."""
        stop_signals.deliver(partial(self._receive_signal, asyncio.get_running_loop()))
        reaping = asyncio.create_task(
            reap_orphans(lambda: [child.process.pid for child in self._children])
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for device in range(len(self._devices)):
                    tasks.create_task(self._keep_running("inference", device))
                http = [
                    tasks.create_task(self._keep_running("http"))
                    for _ in range(self._settings.http_workers or 1)
                ]
                watching = [tasks.create_task(self._watch())]
                if self._source is not None:
                    files = KeyFiles(self._source, self._settings.keys, self._change_keys)
                    watching.append(tasks.create_task(files.watch()))
                await asyncio.wait(http)
                for task in watching:
                    task.cancel()
                self._restarts_end.set()
                for child in self._of("inference"):
                    child.control.close()  # all its requests are answered
        finally:
            reaping.cancel()
            self._kill()
        if not self._status:
            log.info("stopped")
        return self._status

    async def _keep_running(self, role: str, device: int = 0) -> None:
        """Keep a child of this role and device running until the service ends."""
        deaths = failures = 0
        while True:
            try:
                child = await self._start(role, device)
            # Too many processes or files, or too little memory: it may be temporary.
            except OSError as error:
                facts: dict[str, object] = {"problem": str(error)}
                status, served_s = None, None
            else:
                status = await child.process.wait()
                self._children.discard(child)
                child.control.close()
                facts = {"pid": child.process.pid, **exit_reason(child, status)}
                served_s = None if child.serves is None else time.monotonic() - child.serves
            if role == "inference" and len(self._devices) > 1:
                facts["device"] = self._devices[device].name
            if status == CANNOT_START and (role, device) not in self._served:
                self._give_up(status)
            if not self._wanted(role):
                return
            deaths = 1 if served_s is not None and served_s > liveness.SETTLED_S else deaths + 1
            failures = failures + 1 if served_s is None else 0
            pause = liveness.RESTART_PAUSES_S[min(deaths, len(liveness.RESTART_PAUSES_S)) - 1]
            log.error(f"the {role} process ended", **facts, again_in_s=pause)
            if failures >= liveness.FAILED_STARTS:
                problem = f"the {role} process could not be started {failures} times in a row"
                log.error("the service cannot go on", problem=problem)
                self._give_up(CANNOT_GO_ON)
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._restarts_end.wait(), pause)
            if not self._wanted(role):
                return

    async def _watch(self) -> None:
        """Kill a serving child without a heartbeat for `hang_s`. A child that opens bundles may take longer."""
        while True:
            await self._stall_clock.tick()
            for child in self._children:
                silent_s = child.last_report.silent_s
                if child.serves is not None and silent_s > self._settings.hang_s:
                    pid = child.process.pid
                    log.error(f"the {child.role} process hangs", pid=pid, silent_s=silent_s)
                    child.last_report.renew()
                    self._end(child)

    def _wanted(self, role: str) -> bool:
        """Return whether to start a child of this role; while draining, only inference with HTTP processes."""
        if self._restarts_end.is_set():
            return False
        is_draining = self._shutdown.stage >= Stage.DRAINING
        return not is_draining or (role == "inference" and bool(self._of("http")))

    async def _start(self, role: str, device: int = 0) -> Child:
        """Start a child and connect it. Raises OSError."""
        process = child_process.start(role, self._listeners if role == "http" else ())
        keys = self._settings.keys
        config = startup_config(self._settings, self._resume, device, self._devices)
        await process.send_config(config)
        control = ChildControl(process.control, lambda report: self._receive_report(child, report))
        last_report, last_repeat = LastSign(self._stall_clock), LastSign(self._stall_clock)
        child = Child(role, process, control, last_report, last_repeat, device=device)
        for other in self._children:
            if child.talks_to(other):
                self._connect(child, other)
        self._children.add(child)
        if self._settings.keys is not keys:
            self._send_keys(child)
        self._send_stage(child)
        if self._restarts_end.is_set():
            self._end(child)
        return child

    def _receive_report(self, child: Child, report: Report) -> None:
        child.last_report.renew()
        if missing := report.get(MISSING):
            self._repeat(child, bytes([int(str(missing))]))
            return
        changes = report.get("resume")
        if isinstance(changes, dict):
            self._resume = {**(self._resume or {}), **changes}
        child.serves = child.serves or time.monotonic()
        self._served.add((child.role, child.device))
        if child.role == "http":
            self._shutdown.advance(Stage.RUNNING)

    def _connect(self, one: Child, other: Child) -> None:
        """Send each of two children one end of a new channel; where one end is lost, the other closes."""
        try:
            ends = socket.socketpair()
        except OSError as error:
            # The HTTP process reports the missing channel.
            log.error("cannot make a channel", problem=str(error))
            return
        for child, far, end in zip((one, other), (other, one), ends, strict=True):
            self._send(child, channel_to(far.device), end)
            end.close()

    def _repeat(self, child: Child, command: bytes) -> None:
        """Send again what a child reports as missing. End the child if repetition does not help."""
        if command == KEYS:
            self._send_keys(child)
            return
        # If an inference process lacks its end, the process at the other end reports that.
        device = command[0] - PEER
        others = [c for c in self._of("inference") if c.device == device and c.talks_to(child)]
        if child.role != "http" and (child.device or not device):
            others = []
        if not others:
            return
        again = child.last_repeat.silent_s < liveness.CHANNEL_ARRIVED_S
        child.repeated = child.repeated + 1 if again else 1
        child.last_repeat.renew()
        log.warning(
            f"the {child.role} process has no channel; sending another", pid=child.process.pid
        )
        for other in others:
            if child.repeated < liveness.CHANNEL_REPEATS:
                self._connect(child, other)
            else:
                log.error(
                    "cannot send a channel to a process",
                    pids=[child.process.pid, other.process.pid],
                )
                self._end(child)
                self._end(other)

    def _change_keys(self, keys: Keys) -> None:
        self._settings = self._settings.model_copy(update={"keys": keys})
        for child in self._of("http"):
            self._send_keys(child)

    def _send_keys(self, child: Child) -> None:
        if not child.control.send_keys(dump_keys(self._settings.keys)):
            self._end(child)  # its successor starts with these keys

    def _send(self, child: Child, command: bytes, end: socket.socket | None = None) -> None:
        """Send a command. End a child that cannot receive it, because it would miss a change."""
        if not child.control.send(command, end):
            self._end(child)

    def _of(self, role: str) -> Sequence[Child]:
        return [child for child in self._children if child.role == role]

    def _receive_signal(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Handle a stop signal in the thread that receives it."""
        with suppress(RuntimeError):  # the loop is closed: the process ends anyway
            loop.call_soon_threadsafe(self._shutdown.receive_signal, number)

    def _enter(self, stage: Stage) -> None:
        if stage == Stage.LEAVING:
            log.info("leaving", seconds=self._settings.drain_delay_s)
        if stage == Stage.DRAINING:
            for listener in self._listeners:
                listener.close()  # or a client would wait here after the HTTP processes have closed theirs
            patience_s = self._settings.drain_s + liveness.KILL_AFTER_S
            asyncio.get_running_loop().call_later(patience_s, self._shutdown.advance, Stage.STOPPED)
        if stage == Stage.STOPPED:
            self._kill()
        for child in self._of("http"):
            self._send_stage(child)

    def _send_stage(self, child: Child) -> None:
        for command, stage in STAGES.items():
            if stage == self._shutdown.stage:
                self._send(child, command)

    def _give_up(self, status: int) -> None:
        self._status = status
        self._shutdown.advance(Stage.STOPPED)

    def _kill(self) -> None:
        self._restarts_end.set()
        for child in self._children:
            self._end(child)

    def _end(self, child: Child) -> None:
        child.killed = True
        child.process.kill()


def exit_reason(child: Child, status: int) -> dict[str, object]:
    """Return how a child ended, for the log: its status, or that the kernel killed it because of too little memory."""
    is_foreign_kill = status == -signal.SIGKILL and not child.killed
    if is_foreign_kill and (problem := explain_kill(child.oom_kills)):
        return {"problem": problem}
    return {"status": status}


class StartupConfig(NamedTuple):
    """What a child reads from its standard input. resume: the report of the previous leading inference process

    device: the number of its device
    """

    settings: Settings
    resume: Any
    device: int
    devices: Sequence[Place]


def startup_config(
    settings: Settings, resume: object, device: int = 0, devices: Sequence[Place] = ()
) -> bytes:
    places = [asdict(place) for place in devices]
    # JSON of settings has stars in the place of secrets.
    key = settings.receipt_key.get_secret_value() if settings.receipt_key else None
    shown = settings.model_dump_json(exclude={"receipt_key"})
    return f"{shown}\n{json.dumps([resume, device, places, key])}\n".encode()


def read_startup_config(config: bytes) -> StartupConfig:
    text, rest = config.splitlines()
    resume, device, places, key = json.loads(rest)
    devices = [Place(**place) for place in places]
    secret = {"receipt_key": SecretStr(key) if key else None}
    settings = Settings.model_validate_json(text).model_copy(update=secret)
    return StartupConfig(settings, resume, device, devices)
