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
from service.processes.control_channel import ControlChannel
from service.processes.process_signals import IGNORED, STOP, die_with_parent, ignore
from service.processes.supervisor import CANNOT_START, StartupConfig, read_startup_config

log = structlog.get_logger()


def main() -> None:
    ignore((*STOP, *IGNORED))
    role, parent, control, *listener = sys.argv[1:]
    # Until it serves; after that, it completes its accepted requests.
    die_with_parent(True, int(parent))
    config = sys.stdin.buffer.read()
    if not config:
        return  # the main process ended before it had read its settings
    startup = read_startup_config(config)
    settings = startup.settings
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    end_within_s = settings.drain_s + liveness.KILL_AFTER_S
    channel = ControlChannel(socket.socket(fileno=int(control)), end_within_s)
    if role == "inference":
        serve_inference(startup, channel)
    else:
        serve_http(startup, channel, [socket.socket(fileno=int(number)) for number in listener])


# Each role imports only what it needs: an HTTP process has no runtime, and the inference process no web framework.


def serve_inference(startup: StartupConfig, control: ControlChannel) -> None:
    startup.devices[startup.device].enter()
    from service.processes.inference_process import CannotStart, follow, lead

    settings, resume, device, devices = startup
    try:
        if device:
            uvloop.run(follow(settings, control, resume))
        else:
            uvloop.run(lead(settings, control, resume, devices))
    except CannotStart as error:
        log.debug("cannot start", exc_info=True)
        log.error(f"cannot start: {error}")
        sys.exit(CANNOT_START)


def serve_http(
    startup: StartupConfig, control: ControlChannel, listeners: Sequence[socket.socket]
) -> None:
    from service.processes.http_process import Worker

    Worker(startup.settings, control, [d.name for d in startup.devices]).run([*listeners])


if __name__ == "__main__":
    main()
