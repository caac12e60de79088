"""A process of ours: `python -m service.child ROLE ORDERS [LISTENER...] < settings`, started by `service.processes`.

ORDERS and LISTENERs are file descriptors that were inherited.
"""

import signal
import socket
import sys
from collections.abc import Sequence

import structlog
import uvloop

from service import logs
from service.inference import compute
from service.orders import Orders
from service.processes import CANNOT_START
from service.settings import Settings

log = structlog.get_logger()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    role, orders, *listener = sys.argv[1:]
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    serve = {"inference": serve_inference, "http": serve_http}[role]
    serve(
        settings,
        Orders(socket.socket(fileno=int(orders))),
        [socket.socket(fileno=int(number)) for number in listener],
    )


# Each role imports what it needs: an HTTP process has no runtime, and the inference process no framework.


def serve_inference(settings: Settings, orders: Orders, _: Sequence[socket.socket]) -> None:
    from service.inference import CannotStart

    try:
        uvloop.run(compute(settings, orders))
    except CannotStart as error:
        log.debug("cannot start", exc_info=True)
        log.error(f"cannot start: {error}")
        sys.exit(CANNOT_START)


def serve_http(settings: Settings, orders: Orders, listeners: Sequence[socket.socket]) -> None:
    from service.worker import Worker

    Worker(settings, orders).run([*listeners])


if __name__ == "__main__":
    main()
