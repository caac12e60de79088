"""The Prometheus metrics: names in base units, labels from small closed sets.

`route` is a route's template and never the path that a client sent. `model` is the id of a served bundle, `tenant` is
the name of a configured key, and `reason` is an error code. Counters of refusals, faults and failed self-tests exist
from the start with the value zero, so that a rate includes the first one. All other series begin with their first
observation, because a page of a hundred models would be long.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric

from service.errors import DeadlineExceeded, InternalError, Overloaded, kinds
from service.keys import CLASSES
from service.observability import logs
from service.observability.live_view import LiveView, Send
from service.observability.shared_call import SharedCall
from service.scheduling.executor import BatchStats
from service.scheduling.load import Load, total_load

CONTENT_TYPE = CONTENT_TYPE_LATEST

# These metrics would double the size of the page, and they are of no use.
disable_created_metrics()  # type: ignore[no-untyped-call]

STAGES = ("parse", "encode", "queue", "inference", "return", "decode", "serialise")
REFUSALS = frozenset(kind.code for kind in kinds() if kind.status != InternalError.status)
FAILURES = frozenset(kind.code for kind in kinds() if kind.status == InternalError.status)
# A short deadline of the client can cause these errors.
LATE = frozenset(kind.code for kind in (Overloaded, DeadlineExceeded))
OUTCOMES = ("failed", "ok")
ORDERS = ("load", "promote", "roll_back", "unload")
OK = 200
RENDERING = 0.1  # largest share of time that rendering pages may take

STAGE_SECONDS = (0.0001, 0.00025, 0.0005)  # the additional buckets for stages
COARSE_SECONDS = (0.01, 0.1, 1.0, 10.0)  # for series of many labels
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Counts = dict[str, dict[str, int]]  # number of compared shadow answers, by head and outcome


class Recorder(Protocol):
    """Interface of the metrics for an HTTP process, independent of the process that keeps them."""

    def observe_request(
        self, route: str, model: str, status: int, seconds: float, priority: int = 0
    ) -> None: ...

    def observe_error(self, code: str, client_deadline: bool = False) -> None:
        """Count an error response; client_deadline: the client had set a shorter deadline than the server's."""

    def observe_answer(self, model: str, tenant: str, tokens: int, stages: Sequence[float]) -> None:
        """Record a request's tokens and the seconds per stage, for the stages of `STAGES` that it reached."""

    async def page(self) -> bytes:
        """Return the metrics page in Prometheus's text format."""

    async def watch_live(self, send: Send) -> None:
        """Call a function with each frame of the live view until cancelled. Raises Overloaded or ReplicaLost."""


class Metrics:
    """One process's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: Callable[[], Mapping[str, Mapping[str, str]]] = dict
        self._loads: Callable[[], Mapping[str, Load]] = dict
        self._live = LiveView(lambda: total_load([*self._loads().values()]))
        self.watch_live = self._live.watch
        self._page = SharedCall(self._render_in_thread, RENDERING)
        self._of_models: list[Histogram | Summary | Counter] = []
        self._told: set[str] = set()  # models that have series
        self._cold: set[str] = set()  # models that were not open at the last page
        ProcessCollector(registry=self.registry)
        self._duration = self._histogram(
            "quartet_request_duration_seconds",
            "Seconds from a request's arrival to the end of its response.",
            COARSE_SECONDS,
            "route model status",
        )
        self._answers = self._histogram(
            "quartet_answer_duration_seconds",
            "Seconds from the arrival of an inference request to the end of its successful response, by priority.",
            SECONDS,
            "priority route model",
        )
        stages = self._histogram(
            "quartet_stage_seconds",
            "Seconds of each stage of a request; with several windows, of the slowest.",
            STAGE_SECONDS + SECONDS,
            "stage",
        )
        self._stages = tuple(map(stages.labels, STAGES))
        self._queue_wait = self._histogram(
            "quartet_queue_wait_seconds",
            "Seconds from a window's arrival to the start of its batch.",
            SECONDS,
            "model",
        )
        self._inference = self._summary(
            "quartet_inference_seconds", "Seconds of the session's run of a batch."
        )
        self._batch_tokens = self._summary("quartet_batch_tokens", "Tokens in a batch.")
        self._size = self._summary("quartet_batch_size", "Windows in a batch.")
        self._padding = self._summary(
            "quartet_padding_ratio", "Positions of the same batch with padding, per token."
        )
        self._of_batches: list[Histogram | Summary | Counter] = [
            *(self._queue_wait, self._inference),
            *(self._batch_tokens, self._size, self._padding),
        ]
        self._ready = self._gauge("quartet_ready", "1 while the service is ready, else 0.")
        self._queue_tokens = self._gauge("quartet_queue_tokens", "Tokens that wait for a batch.")
        self._max_queue_tokens = self._gauge(
            "quartet_max_queue_tokens", "Tokens that may wait before requests are refused."
        )
        self._queue_seconds = self._gauge(
            "quartet_queue_seconds", "Expected seconds until all waiting tokens are computed."
        )
        self._max_queue_seconds = self._gauge(
            "quartet_max_queue_seconds",
            "Expected wait in seconds at which requests with the deadline deadline_ms are refused as overloaded.",
        )
        self._device_ready = self._gauge(
            "quartet_device_ready", "1 while a device accepts requests, else 0.", "device"
        )
        self._device_tokens = self._gauge(
            "quartet_device_queue_tokens", "Tokens that wait for a batch of a device.", "device"
        )
        self._info = self._gauge(
            "quartet_model_info",
            "1 for each loaded model, with its state and how it is computed.",
            "model sha256 state precision provider runtime",
        )
        self._rejected = self._counter(
            "quartet_requests_rejected_total",
            "Requests that were refused, by the error's code.",
            "reason",
        )
        self._client_deadlines = self._counter(
            "quartet_client_deadline_rejections_total",
            "Requests in quartet_requests_rejected_total whose client had set a shorter deadline than deadline_ms.",
            "reason",
        )
        self._failures = self._counter(
            "quartet_internal_errors_total",
            "Requests that failed because of a fault of the service, by the error's code.",
            "code",
        )
        self._tokens = self._counter(
            "quartet_tokens_total", "Tokens of answered requests, by tenant.", "model tenant"
        )
        self._poison = self._counter(
            "quartet_poison_inputs_total",
            "Windows that fail in a batch of their own, or whose output is not finite.",
            "model",
        )
        self._self_tests = self._counter(
            "quartet_canary_runs_total",
            "Self-tests of models: computations of a known input.",
            "model outcome",
        )
        self._orders = self._counter(
            "quartet_model_orders_total",
            "Commands that load, promote, roll back or unload models.",
            "order outcome",
        )
        self._compared = self._counter(
            "quartet_shadow_answers_total",
            "Results of a candidate version for mirrored requests, by comparison with the current version.",
            "model head outcome",
        )
        self._found = self._counter(
            "quartet_cache_windows_total",
            "Windows by where their outputs come from, if results are remembered.",
            "outcome",
        )
        self._lost_lines = self._counter(
            "quartet_log_lines_lost_total",
            "Log lines dropped because standard error was full, closed or not read, without the main process's lines.",
        )
        self._lost_here = 0  # the part of them from this process
        self.compared: dict[str, Counts] = {}
        for reason in REFUSALS:
            self._rejected.labels(reason)
        for reason in LATE:
            self._client_deadlines.labels(reason)
        for code in FAILURES:
            self._failures.labels(code)
        for order in ORDERS:
            for outcome in OUTCOMES:
                self._orders.labels(order, outcome)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: str) -> Histogram:
        made = Histogram(name, text, labels.split(), buckets=buckets, registry=self.registry)
        if "model" in labels.split():
            self._of_models.append(made)
        return made

    def _summary(self, name: str, text: str) -> Summary:
        """Return a metric of sums and counts by model, which need fewer series than a histogram."""
        made = Summary(name, text, ["model"], registry=self.registry)
        self._of_models.append(made)
        return made

    def _gauge(self, name: str, text: str, labels: str = "") -> Gauge:
        return Gauge(name, text, labels.split(), registry=self.registry)

    def _counter(self, name: str, text: str, labels: str = "") -> Counter:
        made = Counter(name, text, labels.split(), registry=self.registry)
        if "model" in labels.split():
            self._of_models.append(made)
        return made

    def observe_request(
        self, route: str, model: str, status: int, seconds: float, priority: int = 0
    ) -> None:
        self._told.add(model)
        self._duration.labels(route, model, str(status)).observe(seconds)
        if model and status == OK:
            self._answers.labels(CLASSES[priority], route, model).observe(seconds)
            if self._live.watched:
                self._live.add_answer(priority, seconds)

    def observe_error(self, code: str, client_deadline: bool = False) -> None:
        if code in FAILURES:
            self._failures.labels(code).inc()
        if code in REFUSALS:
            self._rejected.labels(code).inc()
            if self._live.watched:
                self._live.add_refusal(code)
        if code in LATE and client_deadline:
            self._client_deadlines.labels(code).inc()

    def observe_answer(self, model: str, tenant: str, tokens: int, stages: Sequence[float]) -> None:
        self._told.add(model)
        self._tokens.labels(model, tenant).inc(tokens)
        for stage, seconds in zip(self._stages, stages, strict=False):
            stage.observe(seconds)

    def observe_canary(self, model: str, well: bool) -> None:
        self._told.add(model)
        self._self_tests.labels(model, OUTCOMES[well]).inc()

    def observe_order(self, order: str, well: bool) -> None:
        self._orders.labels(order, OUTCOMES[well]).inc()

    def observe_comparison(self, model: str, head: str, outcome: str, number: int) -> None:
        self._told.add(model)
        self._compared.labels(model, head, outcome).inc(number)
        counts = self.compared.setdefault(model, {}).setdefault(head, {})
        counts[outcome] = counts.get(outcome, 0) + number

    def observe_found(self, found: Mapping[str, int]) -> None:
        """Count windows by where their outputs come from, see `service.engines.result_cache`."""
        for outcome, number in found.items():
            self._found.labels(outcome).inc(number)

    def observe_lost_lines(self, number: int) -> None:
        self._lost_lines.inc(number)

    def observe_batch(self, stats: BatchStats, padded: bool = False) -> None:
        """Record a batch. padded: whether the graph computes padding like tokens"""
        if self._live.watched:
            self._live.add_batch(stats, padded)
        model = stats.bundle
        self._told.add(model)
        wait = self._queue_wait.labels(model)
        for seconds in stats.queue_s:
            wait.observe(seconds)
        self._inference.labels(model).observe(stats.inference_s)
        self._batch_tokens.labels(model).observe(stats.tokens)
        self._size.labels(model).observe(stats.size)
        self._padding.labels(model).observe(stats.padding_ratio)
        if stats.failed:
            self._poison.labels(model).inc(len(stats.failed))

    def observe_remote_batch(
        self, figures: Mapping[str, Any], failed: int, padded: bool = False
    ) -> None:
        """Record a batch of another process: the fields of its `BatchStats`, and how many of its entries failed."""
        stats = BatchStats(**figures)
        self.observe_batch(stats, padded)
        if failed:
            self._poison.labels(stats.bundle).inc(failed)

    def watch(
        self,
        loads: Callable[[], Mapping[str, Load]],
        models: Callable[[], Mapping[str, Mapping[str, str]]],
        max_queue_s: float = 0.0,
    ) -> None:
        """Read the load of each device by its name, and facts of models by id, for each page.

        max_queue_s: the wait at which requests are refused
        """
        self._loads = loads
        self._max_queue_seconds.set(max_queue_s)
        self._models = models

    def render(self) -> bytes:
        """Return the metrics page, of type `CONTENT_TYPE`."""
        self._update()
        return generate_latest(self.registry)

    async def _render_in_thread(self) -> bytes:
        """Read the values in the event loop, where they change, and format them in a thread: that takes longest."""
        self._update()
        families = Collected([*self.registry.collect()])
        return await asyncio.to_thread(generate_latest, families)

    def _update(self) -> None:
        """Update the values that are read only for a page: gauges, and the set of series."""
        if loads := self._loads():
            load = total_load([*loads.values()])
            self._ready.set(load.ready)
            self._queue_tokens.set(load.queue_tokens)
            self._max_queue_tokens.set(load.max_queue_tokens)
            self._queue_seconds.set(load.drain_s)
        for device, own in loads.items():
            self._device_ready.labels(device).set(own.ready)
            self._device_tokens.labels(device).set(own.queue_tokens)
        models = self._models()
        lost = logs.lost_lines()
        self.observe_lost_lines(lost - self._lost_here)
        self._lost_here = lost
        self.forget_others(models)
        # After one more page, so that no observation is lost.
        cold = {model for model, facts in models.items() if facts["state"] == "cold"}
        self._end(cold & self._cold, self._of_batches)
        self._cold = cold
        self._info.clear()
        for model, facts in models.items():
            self._info.labels(model=model, **facts).set(1)
            self._told.add(model)
            self._poison.labels(model)
            for outcome in OUTCOMES:
                self._self_tests.labels(model, outcome)

    def forget_others(self, models: Collection[str]) -> None:
        """Remove the series of all models except these, unless there are none, so that they do not become too many."""
        gone = self._told - {"", *models} if models else set()
        for model in gone:
            self.compared.pop(model, None)
        self._end(gone, self._of_models)
        self._told -= gone

    def _end(
        self, models: Collection[str], families: Sequence[Histogram | Summary | Counter]
    ) -> None:
        """Remove the series of these models from some families."""
        for model in models:
            for family in families:
                family.remove_by_labels({"model": model})

    async def page(self) -> bytes:
        return await self._page()


@dataclass(frozen=True)
class Collected:
    """A registry of metric families that are already collected."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families
