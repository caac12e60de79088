"""`quartet compare A B --watch PORT`: a proxy mirrors requests to this port, and both servers answer the copies."""

import argparse
import asyncio
import random
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quartet.comparison.report import SHOWN, Limits, Report, Row, check, summarize, wait
from quartet.comparison.servers import PATHS, Server
from quartet.comparison.sides import Side, SideError, Task
from service.engines.mirroring import outcome

KEPT = 1000  # newest copies, of which the figures are
OUTCOMES = ("same", "changed", "failed", "refused", "dropped")
# Headers of a copy that are not sent on: they belong to its connection, or ask for other responses than JSON.
OWN = {"accept", "accept-encoding", "connection", "content-length", "expect", "host", "te"}
OWN |= {"transfer-encoding", "upgrade"}


class Watch(Collector):
    """An ASGI application that compares the answers to copies of requests, and exports figures.

    share: of the copies that are compared; most: copies at the same time, further ones are dropped
    """

    def __init__(
        self, a: Server, b: Server, task: Task, share: float, most: int, limits: Limits
    ) -> None:
        self._a, self._b, self._task, self._limits = a, b, task, limits
        self._share, self._most = share, most
        self._running = set[asyncio.Task[None]]()
        self._rows = deque[Row](maxlen=KEPT)
        known = filter(None, (paths.get(task) for paths in PATHS.values()))
        self._paths = {path.rpartition("/")[2] for path in known}
        self._registry = CollectorRegistry()
        text = "Copies of requests by the comparison of both answers."
        self._counts = Counter(
            "quartet_compare_answers", text, ["outcome"], registry=self._registry
        )
        for name in OUTCOMES:
            self._counts.labels(name)
        self._registry.register(self)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Compare a copy, whose response is empty and does not wait for it. GET returns the metrics."""
        if scope["method"] == "GET":
            status, content = 200, await asyncio.to_thread(generate_latest, self._registry)
        else:
            status, content = 204, b""
            if scope["path"].rpartition("/")[2] in self._paths and random.random() < self._share:
                await self._take(scope, receive)
        kind = [(b"content-type", b"text/plain; version=0.0.4")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": content})

    async def _take(self, scope: MutableMapping[str, Any], receive: Any) -> None:
        """Read a copy, and start its comparison if there is capacity."""
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if len(self._running) >= self._most:
            self._counts.labels("dropped").inc()
            return
        path = scope["raw_path"].decode()
        if scope["query_string"]:
            path += f"?{scope['query_string'].decode()}"
        sent = ((name.decode(), value.decode("latin-1")) for name, value in scope["headers"])
        headers = {name: value for name, value in sent if name not in OWN}
        running = asyncio.create_task(self._compare(path, body, headers))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _compare(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        sides = (self._a, self._b)
        replies = (wait(side.send(self._task, path, body, headers)) for side in sides)
        a, b = await asyncio.gather(*replies)
        if a.error and b.error:
            self._counts.labels("refused").inc()
            return
        self._rows.append(Row(body[:SHOWN].decode(errors="replace"), a, b))
        found = "failed" if a.error or b.error else outcome(a.answer, b.answer)
        self._counts.labels(found).inc()

    def report(self) -> Report:
        """Return the report of the newest copies. Raises SideError if there is none."""
        return summarize(self._a.name, self._b.name, self._task, [*self._rows])

    def collect(self) -> Iterator[Metric]:
        """Yield the figures, as soon as each limit has one."""
        try:
            figures = self.report().figures
            beyond = check(figures, self._limits)
        except (SideError, ValueError):
            return
        text = f"Figure of the newest {KEPT} copies, by its name in reports."
        family = GaugeMetricFamily("quartet_compare_figure", text, labels=["figure"])
        for name, value in figures.items():
            family.add_metric([name], value)
        yield family
        text = "Figures that are beyond their limits."
        yield GaugeMetricFamily("quartet_compare_beyond", text, len(beyond))


async def watch(
    a: Side, b: Side, task: Task, arguments: argparse.Namespace, limits: Limits
) -> Report:
    """Compare copies until SIGINT or SIGTERM, and return the report. Raises SideError, OSError and ValueError."""
    if not (isinstance(a, Server) and isinstance(b, Server)):
        raise ValueError("--watch: A and B must be URLs of servers")
    host, _, port = arguments.watch.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"--watch: {arguments.watch!r} is not [HOST:]PORT")
    watched = Watch(a, b, task, arguments.share, arguments.connections, limits)
    config = uvicorn.Config(watched, lifespan="off", log_level="warning")
    disable_created_metrics()  # type: ignore[no-untyped-call]
    for name in (signal.SIGINT, signal.SIGTERM):  # which uvicorn handles, and raises again
        signal.signal(name, lambda *_: None)
    with socket.create_server((host or "127.0.0.1", int(port))) as listener:
        address = "{}:{}".format(*listener.getsockname())
        print(f"mirror requests to http://{address}; figures: /metrics", file=sys.stderr)
        await uvicorn.Server(config).serve([listener])
    return watched.report()
