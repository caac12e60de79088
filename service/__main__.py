"""`python -m service BUNDLE...`: settings from flags and variables, then a server until SIGTERM."""

import argparse
import asyncio
import gc
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from service import __version__, logs
from service.app import create_app
from service.bundle import MANIFEST
from service.calls import Service
from service.engines import open_engines
from service.metrics import Metrics
from service.settings import PREFIX, Settings, unknown_variables

log = structlog.get_logger()

BUNDLES = Path("bundles")  # looked in when no bundle is named
GRACE_S = 0.4  # for those who have connected and are about to ask


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until told to stop. Exits: 1 port is busy, 2 bad settings, 3 bad bundle."""
    settings = read_settings(argv)
    logs.configure(settings.log_level, settings.log_format, sys.stderr)
    for line in unknown_variables(os.environ):
        log.warning(line)
    listener = bind(settings.host, settings.port)
    metrics = Metrics()
    app = create_app(settings, partial(open_engines, metrics), metrics)
    Server(app, settings).run([listener])


class Server(uvicorn.Server):
    """Uvicorn's server: it says where it listens, and from the signal on that it is draining."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,  # longer than the 60 s after which load balancers let go
            timeout_graceful_shutdown=max(0, math.floor(settings.drain_s - GRACE_S)),
        )
        super().__init__(config)
        self.service: Service = app.state.service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the event loop accept from duplicates: when it has let go, the queues behind are ours."""
        await super().startup([listener.dup() for listener in sockets or []])
        gc.collect()
        gc.freeze()  # what lives as long as the process need not be looked at again and again
        for listener in sockets or []:
            log.info("serving", url=url_of(listener), pid=os.getpid())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lose nobody: uvicorn alone resets who has connected and is not yet heard."""
        log.info("draining", seconds=self.service.settings.drain_s)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            waiting = [*accept_all(listener)]
            listener.close()
            for connection in waiting:
                await asyncio.get_running_loop().connect_accepted_socket(self.protocol, connection)
        await asyncio.sleep(GRACE_S)
        await super().shutdown(sockets)

    def protocol(self) -> asyncio.Protocol:
        """One connection's protocol, as uvicorn makes it."""
        state, lifespan = self.server_state, self.lifespan.state
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=state, app_state=lifespan)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # No logging here: the signal may have interrupted a log line, which holds the log's lock.
        self.service.draining = True
        self.force_exit = self.should_exit  # asked twice
        self.should_exit = True


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """Whoever has connected and waits to be accepted."""
    listener.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            yield listener.accept()[0]


def read_settings(argv: Sequence[str] | None) -> Settings:
    """Settings from the command line, then the environment. Exits with 2 and one line when bad."""
    given = vars(parser().parse_args(argv))
    try:
        settings = Settings(**given)
    except ValidationError as error:
        faults = "; ".join(f"{name_of(e['loc'])}: {e['msg']}" for e in error.errors())
        raise fail(faults, 2) from None
    bundles = settings.bundles or tuple(sorted(m.parent for m in BUNDLES.glob(f"[!.]*/{MANIFEST}")))
    if not bundles:
        raise fail(f"name a bundle to serve: there is none in {BUNDLES}/", 2)
    return settings.model_copy(update={"bundles": bundles})


def name_of(location: Sequence[int | str]) -> str:
    name = str(location[0])
    return f"{flag(name)} ({PREFIX}{name.upper()})"


def parser() -> argparse.ArgumentParser:
    """Every setting as a flag, described by its field."""
    parser = argparse.ArgumentParser(
        "python -m service", description="Serve bundles over HTTP.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"quartet {__version__}")
    for name, field in Settings.model_fields.items():
        add_argument(parser, name, field)
    return parser


def add_argument(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    if name == "bundles":
        parser.add_argument(
            name, nargs="*", metavar="BUNDLE", default=argparse.SUPPRESS, help=field.description
        )
        return
    default = "unset" if field.default is None else field.default
    parser.add_argument(
        flag(name),
        default=argparse.SUPPRESS,
        metavar="VALUE",
        help=f"{field.description} (default {default}; {PREFIX}{name.upper()})",
    )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow is done. Exits with 1 and one line when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise fail(f"cannot listen on {host}:{port}: {reason}", 1) from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def fail(message: str, status: int) -> SystemExit:
    """End the process with one line on standard error: `raise fail(...)`."""
    print(f"quartet: {message}", file=sys.stderr)
    return SystemExit(status)


if __name__ == "__main__":
    main()
