"""HTTP and inference in one process."""

import socket
from collections.abc import Sequence
from functools import partial

from service.app import create_app
from service.local import open_local_engines
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings


def serve_alone(settings: Settings, listeners: Sequence[socket.socket]) -> None:
    """Serve until SIGTERM."""
    metrics = Metrics(settings.keys)
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    Server(app, settings).run([*listeners])
