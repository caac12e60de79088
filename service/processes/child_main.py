"""Entry point of a child process, which `service.processes.supervisor` starts.

Its command line is `python -m service.processes.child_main ROLE PARENT CONTROL [LISTENER...] < CONFIG`.

PARENT is the process id of the main process. CONTROL and LISTENERs are inherited file descriptors.
"""

import socket
import sys
from collections.abc import Sequence

import structlog
import uvloop

from service import liveness
from service.observability import logs
from service.processes.control_channel import ControlChannel, Report
from service.processes.process_signals import IGNORED, STOP, die_with_parent, ignore
from service.processes.supervisor import CANNOT_START, read_startup_config
from service.settings import Settings

log = structlog.get_logger()


def main() -> None:
    ignore((*STOP, *IGNORED))
    role, parent, control, *listener = sys.argv[1:]
    # Until it serves; after that, it completes its accepted requests.
    die_with_parent(True, int(parent))
    config = sys.stdin.buffer.read()
    if not config:
        return  # the main process ended before it had read its settings
    settings, resume = read_startup_config(config)
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    end_within_s = settings.drain_s + liveness.KILL_AFTER_S
    channel = ControlChannel(socket.socket(fileno=int(control)), end_within_s)
    if role == "inference":
        serve_inference(settings, channel, resume)
    else:
        serve_http(settings, channel, [socket.socket(fileno=int(number)) for number in listener])


# Each role imports only what it needs: an HTTP process has no runtime, and the inference process no web framework.


def serve_inference(settings: Settings, control: ControlChannel, resume: Report | None) -> None:
    from service.processes.inference_process import CannotStart, compute

    try:
        uvloop.run(compute(settings, control, resume))
    except CannotStart as error:
        log.debug("cannot start", exc_info=True)
        log.error(f"cannot start: {error}")
        sys.exit(CANNOT_START)


def serve_http(
    settings: Settings, control: ControlChannel, listeners: Sequence[socket.socket]
) -> None:
    from service.processes.http_process import Worker

    Worker(settings, control).run([*listeners])


if __name__ == "__main__":
    main()
