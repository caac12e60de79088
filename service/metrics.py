"""What Prometheus reads: names in base units, labels from small closed sets.

`route` is a route's template and never the path that a client wrote, `model` is the id of a bundle
that is served, `reason` is a code of the error tree.
"""

from collections.abc import Callable
from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from service.batcher import BatchStats

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the page, and nobody reads them

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RATIOS = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


class Recorder(Protocol):
    """Metrics as an HTTP process needs them, wherever they are kept."""

    def observe_request(self, route: str, model: str, status: int, seconds: float) -> None: ...

    def observe_rejection(self, reason: str) -> None: ...

    async def page(self) -> bytes:
        """The text that Prometheus scrapes."""


class Metrics:
    """One process's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._duration = self._histogram(
            "quartet_request_duration_seconds",
            "From a request's arrival to the end of its answer.",
            SECONDS,
            "route",
            "model",
            "status",
        )
        self._queue_wait = self._histogram(
            "quartet_queue_wait_seconds", "From a window's arrival to its batch.", SECONDS, "model"
        )
        self._inference = self._histogram(
            "quartet_inference_seconds", "The session's time for a batch.", SECONDS, "model"
        )
        self._tokens = self._histogram(
            "quartet_batch_tokens", "Tokens in a batch.", TOKENS, "model"
        )
        self._size = self._histogram("quartet_batch_size", "Windows in a batch.", SIZES, "model")
        self._padding = self._histogram(
            "quartet_padding_ratio", "Slots a padded batch would have, per token.", RATIOS, "model"
        )
        self._queue_tokens = Gauge(
            "quartet_queue_tokens", "Tokens that wait for a batch.", registry=self.registry
        )
        self._rejected = Counter(
            "quartet_requests_rejected_total",
            "Requests that were refused, by the error's code.",
            ["reason"],
            registry=self.registry,
        )
        self._poison = Counter(
            "quartet_poison_inputs_total",
            "Windows that a model failed on, or gave no number for, alone.",
            ["model"],
            registry=self.registry,
        )
        self._canaries = Counter(
            "quartet_canary_runs_total",
            "Computations of a known input, to see that a model is well.",
            ["model", "outcome"],
            registry=self.registry,
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def observe_request(self, route: str, model: str, status: int, seconds: float) -> None:
        self._duration.labels(route, model, str(status)).observe(seconds)

    def observe_rejection(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def observe_canary(self, model: str, well: bool) -> None:
        self._canaries.labels(model, "ok" if well else "failed").inc()

    def observe_batch(self, stats: BatchStats) -> None:
        model = stats.bundle
        wait = self._queue_wait.labels(model)
        for seconds in stats.queue_s:
            wait.observe(seconds)
        self._inference.labels(model).observe(stats.inference_s)
        self._tokens.labels(model).observe(stats.tokens)
        self._size.labels(model).observe(stats.size)
        self._padding.labels(model).observe(stats.padding_ratio)
        if stats.failed:
            self._poison.labels(model).inc(len(stats.failed))

    def watch_queue(self, tokens: Callable[[], int]) -> None:
        """Ask `tokens` for the length of the queue whenever the metrics are read."""
        self._queue_tokens.set_function(tokens)

    def render(self) -> bytes:
        """The text that Prometheus scrapes, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    async def page(self) -> bytes:
        return self.render()
